"""Times measured node by node on real tensors, by this host's clock or by CUDA events (DawnPiper C.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from evenpipe.partition.counting import Work, without_history
from evenpipe.partition.timing.source import NodeTimes
from evenpipe.partition.trace import Graph, evaluate
from evenpipe.runtime.precisions import autocasting
from evenpipe.runtime.timing import clock_for

__all__ = ["Measured"]

_WARM_UP: Final = 3
_REPETITIONS: Final = 50  # as many batches as the paper averages


@dataclass(frozen=True)
class Measured:
    """Runs every node's forward, and its backward alone, on a device that is here and holds the whole model.

    Values are random or one, as times do not depend on them. After the warm-up the median of the repetitions counts,
    where the paper takes the average: it is the same on a device of one's own, and steadier on a shared one.
    """

    on: torch.device
    repetitions: int = _REPETITIONS
    warm_up: int = _WARM_UP

    name = "measured"

    @property
    def device(self) -> str:
        return torch.cuda.get_device_name(self.on) if self.device_type == "cuda" else self.device_type

    @property
    def device_type(self) -> str:
        return self.on.type

    def times(
        self,
        graph: Graph,
        works: Sequence[Work],
        precision: str,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[NodeTimes, ...]:
        """The medians of each node; `progress(done, total)` after each pass over the graph."""
        clock = clock_for(self.on)
        real = _Real(self.on)
        inputs = {name: real.of(tensor) for name, tensor in graph.inputs.items()}
        main = frozenset(graph.nodes)
        passes = []
        for number in range(self.warm_up + self.repetitions):
            marks: list[tuple[Any, Any, Any, Any]] = []

            def call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], marks: list[Any] = marks) -> Any:
                args, kwargs = tree_map_only(torch.device, lambda _: self.on, (args, kwargs))
                if node not in main:
                    return node.target(*args, **kwargs)  # type: ignore[operator]
                leaves: list[Tensor] = []
                changes = bool(graph.observed[node].changes)
                args, kwargs = tree_map(lambda value: without_history(value, leaves, changes=changes), (args, kwargs))
                start = clock.mark()
                result = node.target(*args, **kwargs)  # type: ignore[operator]
                forward = clock.mark()
                outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
                gradients = [torch.ones_like(output) for output in outputs]
                begin = clock.mark()
                if outputs and leaves:
                    torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
                marks.append((start, forward, begin, clock.mark()))
                return tree_map_only(
                    Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), result
                )

            with torch.enable_grad(), autocasting(self.device_type, graph.autocast):
                evaluate(graph.module, inputs, call, real.of)
            passes.append([(clock.elapsed_ms(a, b), clock.elapsed_ms(c, d)) for a, b, c, d in marks])
            progress(number + 1, self.warm_up + self.repetitions)
        return tuple(
            NodeTimes(median(forward for forward, _ in node), median(backward for _, backward in node))
            for node in zip(*passes[self.warm_up :], strict=True)
        )


class _Real:
    """Real tensors in place of weightless ones, always the same for the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, Tensor] = {}

    def of(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._made:
            shape, dtype = tuple(value.shape), value.dtype
            tensor = torch.ones(shape, dtype=dtype, device=self._device)
            if dtype.is_floating_point:
                tensor = torch.randn(shape, device=self._device).to(dtype)
            self._made[id(value)] = tensor.requires_grad_(value.requires_grad)
        return self._made[id(value)]
