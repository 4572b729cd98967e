"""What recomputation of each layer of a stage would free and take, seen while a batch trains."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from evenpipe.runtime.memory import MemoryCounter
from evenpipe.runtime.timing import Clock
from evenpipe.simulate.under_cap import Layer

__all__ = ["LayerWatch"]


class LayerWatch:
    """Hooks around the forwards of `layers`, by model chunk, in a batch of which `counter` counts all that is saved.

    A layer that is recomputed saves its inputs; those that need no gradients are shared by layers and not counted.
    `repeats`: recomputation repeats what a forward does to its buffers, such as routers' counts of tokens.
    """

    def __init__(
        self, layers: Sequence[Sequence[nn.Module]], counter: MemoryCounter, clock: Clock, repeats: bool = True
    ) -> None:
        self._layers = layers
        self._counter = counter
        self._clock = clock
        self._repeats = repeats
        self._changed = set[nn.Module]()
        self._began: dict[nn.Module, tuple[list[Any], int, Any]] = {}
        self._freed = defaultdict[nn.Module, list[int]](list)
        self._spans = defaultdict[nn.Module, list[tuple[Any, Any]]](list)
        begins, ends = _uncompiled(self._begins), _uncompiled(self._ends)
        self._handles = [
            handle
            for layer in dict.fromkeys(one for of_chunk in layers for one in of_chunk)
            for handle in (
                layer.register_forward_pre_hook(begins),
                layer.register_forward_hook(ends, with_kwargs=True),
            )
        ]

    def figures(self) -> list[list[Layer]]:
        """Take the hooks away; return the layers' figures: of bytes the least, since others share a first one's.

        Of a chunk, up to the first layer whose buffers a forward has changed, if recomputation repeats that.
        """
        for handle in self._handles:
            handle.remove()
        able = (takewhile(lambda layer: layer not in self._changed, of_chunk) for of_chunk in self._layers)
        return [[self._of(layer) for layer in of_chunk] for of_chunk in able]

    def _of(self, layer: nn.Module) -> Layer:
        elapsed_ms = (self._clock.elapsed_ms(*span) for span in self._spans[layer])
        return Layer(max(0, min(self._freed[layer], default=0)), median([*elapsed_ms] or [0.0]))

    def _begins(self, layer: nn.Module, given: tuple[Any, ...]) -> None:
        self._began[layer] = _states(layer), self._counter.own_bytes, self._clock.mark()

    def _ends(self, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        states, before, start = self._began.pop(layer)
        self._spans[layer].append((start, self._clock.mark()))
        if self._repeats and states != _states(layer):
            self._changed.add(layer)
        storages = (one.untyped_storage() for one in _tensors((given, named)) if one.requires_grad)
        inputs = {storage._cdata: storage.nbytes() for storage in storages}
        self._freed[layer].append(self._counter.own_bytes - before - sum(inputs.values()))


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that torch.compile leaves alone: with a layer compiled in place, it compiles its hooks."""
    if "torch._dynamo" not in sys.modules:  # which takes seconds to import
        return hook
    uncompiled: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return uncompiled


def _states(layer: nn.Module) -> list[Any]:
    """Return what changes with any change in place of a buffer, and with another tensor in a buffer's place."""
    return [(id(one), None if one.is_inference() else one._version) for one in layer.buffers()]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for one in value:
            yield from _tensors(one)
