"""A model as a graph of its operations, in the order in which stages take them, and where it may be cut."""

from evenpipe.partition.trace.exporting import TraceError, tensors_of, users_frame, weightless
from evenpipe.partition.trace.graph import Graph, PartNodes, attention_of, trace
from evenpipe.partition.trace.observing import Observed, StorageNumbers, Value, evaluate, is_random

__all__ = [
    "Graph",
    "Observed",
    "PartNodes",
    "StorageNumbers",
    "TraceError",
    "Value",
    "attention_of",
    "evaluate",
    "is_random",
    "tensors_of",
    "trace",
    "users_frame",
    "weightless",
]
