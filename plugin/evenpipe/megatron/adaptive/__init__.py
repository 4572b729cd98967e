"""kFkB with a group size and a micro-batch size that follow the network: Ada-Grouper in Megatron's training loop."""
