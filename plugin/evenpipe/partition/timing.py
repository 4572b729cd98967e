"""How long each node's forward and backward take: computed for a device that is named, or measured on this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from evenpipe.descriptions import Device
from evenpipe.partition.counting import Effort, Progress, Work, without_history
from evenpipe.partition.trace import Graph, evaluate
from evenpipe.runtime.precisions import autocasting
from evenpipe.runtime.timing import clock_for

__all__ = ["Measured", "NodeTimes", "Roofline", "RooflineError", "TimeSource"]

# What kernels reach of the data sheet's rates: large matrix products on tensor cores 50 to 70 %, element-wise kernels
# and copies 75 to 90 % of the memory's (reported for A100 and H100; not measured here).
_OF_PEAK: Final = 0.6
_OF_BANDWIDTH: Final = 0.8
_WARM_UP: Final = 3
_REPETITIONS: Final = 50  # as many batches as the paper averages


class NodeTimes(NamedTuple):
    """How long one node takes for one micro-batch, in milliseconds."""

    forward_ms: float
    backward_ms: float


class TimeSource(Protocol):
    """How long nodes take on one device. `name`: how it is known, "roofline" or "measured".

    `device`: whose the times are. `device_type`: "cpu" or "cuda", whose kernels it stands for.
    """

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def device_type(self) -> str: ...

    def times(self, graph: Graph, works: Sequence[Work], precision: str, progress: Progress) -> tuple[NodeTimes, ...]:
        """Return the times of the graph's nodes, whose work was counted already."""


class RooflineError(ValueError):
    """A device cannot do what is asked of it; the message is one line."""


@dataclass(frozen=True)
class Roofline:
    """Times of a GPU that need not be here: the longest of computing, moving bytes and launching kernels."""

    of: Device

    name = "roofline"
    device_type = "cuda"

    @property
    def device(self) -> str:
        return self.of.name

    def times(
        self, graph: Graph | None, works: Sequence[Work], precision: str, progress: Progress = lambda done, total: None
    ) -> tuple[NodeTimes, ...]:
        """Return times that depend on the nodes' work alone. Raises RooflineError for a precision the device lacks."""
        tflops = self._tflops(precision)
        return tuple(NodeTimes(self._ms(work.forward, tflops), self._ms(work.backward, tflops)) for work in works)

    def ms(self, effort: Effort, precision: str) -> float:
        """Return the milliseconds of an operation. Raises RooflineError for a precision that the device lacks."""
        return self._ms(effort, self._tflops(precision))

    def _tflops(self, precision: str) -> float:
        peaks = {str(name): peak for name, peak in self.of.tflops.items()}
        if precision not in peaks:
            raise RooflineError(f"{self.of.name} does not compute in {precision}: it does in {', '.join(peaks)}")
        return peaks[precision]

    def _ms(self, effort: Effort, tflops: float) -> float:
        computing = effort.flops / (tflops * 1e12 * _OF_PEAK)
        moving = effort.moved / (self.of.memory_gbps * 1e9 * _OF_BANDWIDTH)
        launching = effort.kernels * self.of.launch_us * 1e-6
        return max(computing, moving, launching) * 1e3


@dataclass(frozen=True)
class Measured:
    """Runs every node's forward, and its backward alone, on a device that is here and holds the whole model (C.1).

    Values are random or one, as times do not depend on them. After the warm-up the median of the repetitions counts,
    where the paper takes the average: it is the same on a device of one's own, and steadier on a shared one. Times are
    by this host's clock, or by CUDA events.
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
        self, graph: Graph, works: Sequence[Work], precision: str, progress: Progress = lambda done, total: None
    ) -> tuple[NodeTimes, ...]:
        """Return the medians of each node; `progress(done, total)` is called after each pass over the graph."""
        clock = clock_for(self.on)
        real = _RealTensors(self.on)
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
                return tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), result)

            with torch.enable_grad(), autocasting(self.device_type, graph.autocast):
                evaluate(graph.module, inputs, call, real.of)
            passes.append([(clock.elapsed_ms(a, b), clock.elapsed_ms(c, d)) for a, b, c, d in marks])
            progress(number + 1, self.warm_up + self.repetitions)
        return tuple(
            NodeTimes(median(forward for forward, _ in node), median(backward for _, backward in node))
            for node in zip(*passes[self.warm_up :], strict=True)
        )


class _RealTensors:
    """Real tensors in place of weightless ones, always the same for the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._real: dict[int, Tensor] = {}

    def of(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._real:
            shape, dtype = tuple(value.shape), value.dtype
            tensor = torch.ones(shape, dtype=dtype, device=self._device)
            if dtype.is_floating_point:
                tensor = torch.randn(shape, device=self._device).to(dtype)
            self._real[id(value)] = tensor.requires_grad_(value.requires_grad)
        return self._real[id(value)]
