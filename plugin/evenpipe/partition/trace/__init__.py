"""A model as a graph of its operations, in the order in which stages take them, and where it may be cut."""

from evenpipe.partition.trace.exporting import TraceError, weightless
from evenpipe.partition.trace.graph import Graph, attention_of, trace
from evenpipe.partition.trace.observing import Observed, StorageNumbers, Value, evaluate

__all__ = [
    "Graph",
    "Observed",
    "StorageNumbers",
    "TraceError",
    "Value",
    "attention_of",
    "evaluate",
    "trace",
    "weightless",
]
