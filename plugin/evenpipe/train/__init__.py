"""The trainer behind `evenpipe train`: options, processes started by torchrun's API, checkpoints and results."""
