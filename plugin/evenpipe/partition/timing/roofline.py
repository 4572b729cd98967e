"""Times computed from what a device can do: the longest of computing, moving bytes and launching kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from evenpipe.partition.counting import Effort, Work
from evenpipe.partition.timing.source import NodeTimes
from evenpipe.partition.trace import Graph
from evenpipe.planner.descriptions import Device

__all__ = ["Roofline", "RooflineError"]

# What kernels reach of the data sheet's rates: large matrix products on tensor cores 50 to 70 %, element-wise kernels
# and copies 75 to 90 % of the memory's (reported for A100 and H100; not measured here).
_OF_PEAK: Final = 0.6
_OF_BANDWIDTH: Final = 0.8


class RooflineError(ValueError):
    """A device cannot do what is asked of it; the message is one line."""


@dataclass(frozen=True)
class Roofline:
    """Times of a GPU that need not be here."""

    of: Device

    name = "roofline"
    device_type = "cuda"

    @property
    def device(self) -> str:
        return self.of.name

    def times(
        self,
        graph: Graph | None,
        works: Sequence[Work],
        precision: str,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[NodeTimes, ...]:
        """One node's time is a function of its work alone. Raises RooflineError for a precision the device lacks."""
        tflops = self._tflops(precision)
        return tuple(NodeTimes(self._ms(work.forward, tflops), self._ms(work.backward, tflops)) for work in works)

    def ms(self, effort: Effort, precision: str) -> float:
        """Milliseconds that an operation takes. Raises RooflineError for a precision that the device lacks."""
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
