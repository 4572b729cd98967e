"""A timeline of one training iteration, from all ranks, whatever framework trains."""
