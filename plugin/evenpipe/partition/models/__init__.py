"""Models to partition: four known ones, and whatever a Python file or a Hugging Face configuration describes."""

from evenpipe.partition.configurations import MODELS
from evenpipe.partition.models.described import Example, ModelError, from_config, from_function, made_in
from evenpipe.partition.models.known import build, example_of

__all__ = ["MODELS", "Example", "ModelError", "build", "example_of", "from_config", "from_function", "made_in"]
