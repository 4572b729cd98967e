"""Descriptions: models, devices, clusters and frameworks, in YAML files, every constant with its source."""

from evenpipe.descriptions.catalog import cluster, described, device, equal_nodes, framework, model, names, node_of
from evenpipe.descriptions.hugging_face import configured, model_types
from evenpipe.descriptions.kinds import (
    Cluster,
    DescriptionError,
    Device,
    Experts,
    Framework,
    Latent,
    Model,
    Precision,
    Rate,
)

__all__ = [
    "Cluster",
    "DescriptionError",
    "Device",
    "Experts",
    "Framework",
    "Latent",
    "Model",
    "Precision",
    "Rate",
    "cluster",
    "configured",
    "described",
    "device",
    "equal_nodes",
    "framework",
    "model",
    "model_types",
    "names",
    "node_of",
]
