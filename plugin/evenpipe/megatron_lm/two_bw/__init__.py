"""2BW in Megatron-LM's own scripts."""
