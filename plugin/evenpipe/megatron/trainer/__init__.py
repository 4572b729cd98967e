"""The embedded trainer behind `evenpipe train`: real megatron-core models in processes started by torchrun's API."""
