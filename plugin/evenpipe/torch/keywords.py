"""Keyword arguments of a model's parts, such as masks and position ids, on any stage."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from evenpipe.torch.base import shares
from evenpipe.wording.nearest import nearest

__all__ = ["Keywords"]


class Keywords:
    """The names that each of a stage's parts takes, and `known`, those of all stages' parts; None: any name."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._taken = [_names(chunk) for chunk in chunks]
        self.known: frozenset[str] | None = None
        self.own = None if None in self._taken else frozenset().union(*(names or () for names in self._taken))

    def shared(self, given: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
        """Return each of `count` micro-batches' share of the batch's keyword arguments.

        A tensor's first dimension is shared out, a list has an entry a micro-batch, and anything else is for all.
        Raises ValueError for what no part takes.
        """
        for name in given:
            if self.known is not None and name not in self.known:
                raise ValueError(f"{name}: no part of the model takes it by name: {nearest(name, sorted(self.known))}")
        each = {name: _shares(name, one, count) for name, one in given.items()}
        return [{name: values[number] for name, values in each.items()} for number in range(count)]

    def of(self, chunk: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the `given` arguments that this chunk's part takes."""
        names = self._taken[chunk]
        return {name: one for name, one in given.items() if names is None or name in names}


def _shares(name: str, value: Any, count: int) -> Sequence[Any]:
    if isinstance(value, list) or (isinstance(value, Tensor) and value.dim()):
        return shares(name, value, count)
    return [value] * count


def _names(chunk: nn.Module) -> frozenset[str] | None:
    """Return the names of `forward`'s arguments; None where it takes any."""
    forward = getattr(chunk, "_orig_mod", chunk).forward  # of what torch.compile has wrapped
    parameters = inspect.signature(forward).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return frozenset(one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))
