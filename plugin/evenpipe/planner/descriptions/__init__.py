"""Descriptions: models, devices, clusters and frameworks, in YAML files, every constant with its source."""

from evenpipe.planner.descriptions.catalog import cluster, device, framework, model, names
from evenpipe.planner.descriptions.clusters import Cluster
from evenpipe.planner.descriptions.devices import Device, Precision
from evenpipe.planner.descriptions.errors import DescriptionError
from evenpipe.planner.descriptions.files import described
from evenpipe.planner.descriptions.frameworks import Framework
from evenpipe.planner.descriptions.models import Experts, Latent, Model

__all__ = [
    "Cluster",
    "DescriptionError",
    "Device",
    "Experts",
    "Framework",
    "Latent",
    "Model",
    "Precision",
    "cluster",
    "described",
    "device",
    "framework",
    "model",
    "names",
]
