"""The only room that names Megatron."""
