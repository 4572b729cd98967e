"""What recomputation of each layer of a stage would free and take, seen while a batch trains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from torch import Tensor, nn

from evenpipe.runtime.memory import MemoryCounter
from evenpipe.runtime.timing import Clock
from evenpipe.simulate.under_cap import Layer

__all__ = ["LayerWatch"]


class LayerWatch:
    """Hooks around the forwards of `layers`, by model chunk, in a batch of which `counter` counts all that is saved.

    A layer that is recomputed saves its inputs that need gradients, and nothing else.
    """

    def __init__(self, layers: Sequence[Sequence[nn.Module]], counter: MemoryCounter, clock: Clock) -> None:
        self._layers = layers
        self._counter = counter
        self._clock = clock
        self._began: dict[nn.Module, tuple[int, Any]] = {}
        self._freed = defaultdict[nn.Module, list[int]](list)
        self._spans = defaultdict[nn.Module, list[tuple[Any, Any]]](list)
        self._handles = [
            handle
            for layer in dict.fromkeys(one for of_chunk in layers for one in of_chunk)
            for handle in (
                layer.register_forward_pre_hook(self._begins),
                layer.register_forward_hook(self._ends, with_kwargs=True),
            )
        ]

    def figures(self) -> list[list[Layer]]:
        """Take the hooks away; return the layers' figures: of bytes the least, since others share a first one's."""
        for handle in self._handles:
            handle.remove()
        return [[self._of(layer) for layer in of_chunk] for of_chunk in self._layers]

    def _of(self, layer: nn.Module) -> Layer:
        elapsed_ms = (self._clock.elapsed_ms(*span) for span in self._spans[layer])
        return Layer(max(0, min(self._freed[layer], default=0)), median([*elapsed_ms] or [0.0]))

    def _begins(self, layer: nn.Module, given: tuple[Any, ...]) -> None:
        self._began[layer] = self._counter.own_bytes, self._clock.mark()

    def _ends(self, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        before, start = self._began.pop(layer)
        self._spans[layer].append((start, self._clock.mark()))
        inputs = {one.untyped_storage()._cdata: one.nbytes for one in _tensors((given, named)) if one.requires_grad}
        self._freed[layer].append(self._counter.own_bytes - before - sum(inputs.values()))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for one in value:
            yield from _tensors(one)
