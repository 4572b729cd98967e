"""The trainer's models, optimizer and iterations in megatron-core."""
