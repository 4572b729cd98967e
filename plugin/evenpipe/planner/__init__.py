"""Planner: which group sizes and micro-batch sizes fit into memory, and how long a batch takes. Pure Python."""
