"""The models of DawnPiper's evaluation (§5.1), full size or small, with the inputs of one micro-batch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from evenpipe.partition.configurations import CONFIGURATIONS, MODELS
from evenpipe.partition.models.amoebanet import AmoebaNet
from evenpipe.partition.models.described import (
    Example,
    ModelError,
    for_training,
    from_config,
    from_function,
    inputs_of,
    made_in,
)
from evenpipe.partition.profile import Origin

__all__ = ["build", "example_of"]


def _transformer(name: str, micro_batch_size: int, attention: str, sequence_length: int, small: bool) -> Example:
    known = CONFIGURATIONS[name]
    length = min(sequence_length, 32) if small else sequence_length
    model = for_training(known["full"] | (known["small"] if small else {}), attention, name)
    return Example(name, model, inputs_of(model, micro_batch_size, length))


def _amoebanet(micro_batch_size: int, small: bool) -> Example:
    classes = 10 if small else 1000
    model = AmoebaNet(layers=3, filters=32, classes=classes) if small else AmoebaNet()
    size = 64 if small else 224
    inputs: dict[str, Tensor] = {
        "images": torch.randn(micro_batch_size, 3, size, size),
        "labels": torch.randint(classes, (micro_batch_size,)),
    }
    return Example("amoebanet-d", model, inputs)


def build(
    name: str,
    micro_batch_size: int,
    *,
    precision: str = "fp32",
    attention: str = "eager",
    sequence_length: int = 512,
    small: bool = False,
) -> Example:
    """Return the model of that name with the inputs of a micro-batch, its weights random, or none under `weightless`.

    `precision`: of weights and activations, fp32, bf16 or fp16. `attention`: eager, as transformers had it for these
    models when DawnPiper was measured (T5 always, BERT and GPT-2 up to 2024), or sdpa. Text has `sequence_length`
    tokens, which the paper does not give, images 224 × 224 pixels. `small`: a few narrow layers and short
    inputs, of the same structure. Raises ModelError.
    """
    if micro_batch_size < 1:
        raise ModelError(f"a micro-batch of {micro_batch_size}: it holds at least one sample")
    if name not in MODELS:
        raise ModelError(f"no model {name!r}: there are {', '.join(MODELS)}; --module and --hf take any other")
    with made_in(precision):
        if name in CONFIGURATIONS:
            return _transformer(name, micro_batch_size, attention, sequence_length, small)
        return _amoebanet(micro_batch_size, small)


def example_of(origin: Origin) -> Example:
    """Return the model of a profile or a plan with random weights, and inputs of its shapes. Raises ModelError."""
    name, size = origin.model, origin.micro_batch_size
    attention, length = origin.attention or "eager", origin.sequence_length or 512
    if name in MODELS:
        return build(
            name, size, precision=origin.precision, attention=attention, sequence_length=length, small=origin.small
        )
    if origin.is_function:
        return from_function(name, size)
    return from_config(Path(name), size, precision=origin.precision, attention=attention, sequence_length=length)
