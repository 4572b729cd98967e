"""Adaptive kFkB in Megatron-LM's own scripts."""
