"""Layers of a stage that save their inputs alone, and are computed again by their backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
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

    Recomputation draws the random numbers that the forward drew, of the default generators of torch's host and of the
    devices of a layer's inputs. A layer may be there twice.
    """
    before = {layer: layer.__dict__.get("forward") for layer in layers}
    for layer in before:
        layer.forward = _computed_again(layer.forward)
    try:
        yield
    finally:
        for layer, forward in before.items():
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _computed_again(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward`, which its backward calls again.

    `checkpoint` saves those tensors for backward that are its own positional arguments, and holds others where nobody
    counts or moves them; and it keeps no random state for arguments by name. So it is given all tensors of a layer's
    arguments one by one.
    """

    def call(*args: Any, **named: Any) -> Any:
        flat, shape = tree_flatten((args, named))

        def again(*leaves: Any) -> Any:
            args, named = tree_unflatten(leaves, shape)
            return forward(*args, **named)

        return checkpoint(again, *flat, use_reentrant=False)

    return call
