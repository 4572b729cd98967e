"""The model that a profile, or a plan, is of, made again."""

from __future__ import annotations

from pathlib import Path

from evenpipe.partition.models.example import Example
from evenpipe.partition.models.files import from_config, from_function
from evenpipe.partition.models.known import MODELS, build
from evenpipe.partition.profile import Origin

__all__ = ["example_of"]


def example_of(origin: Origin) -> Example:
    """A model of that name or file, with random weights, and inputs of the origin's shapes. Raises ModelError."""
    name, size = origin.model, origin.micro_batch_size
    attention, length = origin.attention or "eager", origin.sequence_length or 512
    if name in MODELS:
        return build(
            name, size, precision=origin.precision, attention=attention, sequence_length=length, small=origin.small
        )
    if ":" in Path(name).name:
        return from_function(name, size)
    return from_config(Path(name), size, precision=origin.precision, attention=attention, sequence_length=length)
