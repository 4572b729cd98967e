"""Seconds of matrix products, element-wise kernels and collectives on one device of a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import ceil
from typing import Final

from evenpipe.planner.descriptions import Cluster
from evenpipe.planner.operations.operation import Collective, FusedAttention, Gemm, Moved, Work
from evenpipe.planner.run import Run
from evenpipe.planner.time.calibration import Calibration
from evenpipe.planner.time.links import Links

__all__ = ["Kernels"]

#: Tiles that a matrix product is cut into, and what each reaches of the best (CUTLASS's shapes for tensor cores).
_TILES: Final = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 64, 0.65))
_SPLITS: Final = (1, 2, 4, 8)
_LEAST_SPLIT: Final = 4096  # inner dimension from which cuBLAS splits it


class Kernels:
    """How long each work takes under ``run`` on ``cluster``."""

    def __init__(self, run: Run, cluster: Cluster, calibration: Calibration) -> None:
        assert run.precision is not None
        device = cluster.device
        self.links = Links(run, cluster, calibration)
        self._calibration = calibration
        self._flops = device.tflops[run.precision] * 1e12
        self._device = device
        self._bytes = device.memory_gbps * 1e9 * calibration.memory
        self._launch = device.launch_us * 1e-6
        self._element = run.element_bytes
        self._product = cache(self._gemm)

    def seconds(self, works: Iterable[Work]) -> float:
        """All of them, one after the other; a collective that runs behind a matrix product takes what is left."""
        return sum(map(self._of, works))

    def moved(self, nbytes: float) -> float:
        """Element-wise kernels that read and write so many bytes."""
        return nbytes / self._bytes

    def _of(self, work: Work) -> float:
        match work:
            case Gemm():
                return self._product(work)
            case Moved():
                slow = self._calibration.unfused if work.unfused else 1.0
                return self.moved(work.nbytes * slow) + work.kernels * self._launch
            case FusedAttention():
                return work.flops / (self._flops * self._device.attention[work.backward]) + self._launch
            case Collective():
                takes = self.links.collective(work.nbytes, work.group)
                if work.behind is None:
                    return takes
                beside = self._product(work.behind)
                return max(takes - beside, 0.0) + self._calibration.hidden * min(takes, beside)

    def _gemm(self, work: Gemm) -> float:
        """Whole waves of tiles over all multiprocessors, the best of the tiles; never faster than its bytes."""
        rate = self._flops * self._device.matmul / self._device.multiprocessors * self._calibration.gemm
        best = min(
            self._waves(work, rows, columns, split)
            * 2
            * rows
            * columns
            * (work.k / split + self._calibration.depth)
            / reached
            for rows, columns, reached in _TILES
            for split in (_SPLITS if work.batch == 1 and work.k >= _LEAST_SPLIT else (1,))
        )
        nbytes = self._element * work.batch * (work.m * work.k + work.k * work.n + work.m * work.n)
        return max(best / rate, self.moved(nbytes)) + self._launch

    def _waves(self, work: Gemm, rows: int, columns: int, split: int) -> int:
        tiles = ceil(work.m / rows) * ceil(work.n / columns) * ceil(work.batch) * split
        return ceil(tiles / self._device.multiprocessors)
