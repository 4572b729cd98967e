"""Engines that run the same emulated stages: Megatron-core's, torch's, DeepSpeed's and EvenPipe's, each unmodified."""
