"""What each node of a graph keeps for the backward, and what its forward and backward have to do."""

from evenpipe.partition.counting.counts import Counts, NodeCounts, between, count, graph_digest
from evenpipe.partition.counting.work import Effort, Work, without_history

__all__ = ["Counts", "Effort", "NodeCounts", "Work", "between", "count", "graph_digest", "without_history"]
