"""Adaptive kFkB in Megatron."""
