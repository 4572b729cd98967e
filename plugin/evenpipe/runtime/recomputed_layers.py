"""Layers of a stage that save their inputs alone, and are computed again by their backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

__all__ = ["recomputing_layers", "stateless"]


def stateless(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the layers from the first on, up to one whose forward changes what it keeps: running statistics."""
    return list(takewhile(lambda layer: not any(map(_keeps_statistics, layer.modules())), layers))


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.track_running_stats


@contextmanager
def recomputing_layers(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Within it, forwards of these layers save their inputs, and their backwards compute the rest again.

    A layer may be among them several times. Recomputation draws the random numbers that the forward drew, of torch's
    generators.
    """
    layers = list(dict.fromkeys(layers))
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward
