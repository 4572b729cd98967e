"""What kernels and links reach of their data sheets: three fitted shares, and those that others have measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["FITTED", "UNFITTED", "Calibration"]


@dataclass(frozen=True)
class Calibration:
    """gemm: share of a device's fastest matrix product that large ones reach in training. unfused: time of a softmax
    that is not fused, relative to its counted bytes. peer: share of a node's links that a collective reaches.

    depth: the inner dimension at which a matrix product reaches half of its rate, that of a tile's start and end.
    memory: share of the memory's rate that element-wise kernels reach. copy, node: share of a node's links that plain
    copies reach, and of what leaves it. hidden: what a collective costs the matrix product that it hides behind.
    """

    gemm: float
    unfused: float
    peer: float
    depth: float = 128.0  # a prologue and an epilogue of four steps of 32, by CUTLASS's tiles
    memory: float = 0.80  # element-wise kernels of PyTorch on A100 and H100 reach 75 to 90 %
    copy: float = 0.83  # BPipe Tables 3 and 4 with Eq. 4 to 6: 222 to 266 GB/s of 300
    node: float = 0.90  # nccl-tests over InfiniBand: 22 to 23 of 25 GB/s
    hidden: float = 0.15  # Calculon's `processor_usage` of NVLink's collectives (Isaev et al. 2023)


#: gemm, unfused and peer by least squares on the 26 rows of BPipe Table 7 that Megatron ran alone and that are taken
#: (`benchmarks/planner_truth.py` fits them again).
FITTED: Final = Calibration(gemm=0.886, unfused=1.233, peer=0.751)

#: Without any fit. gemm: 8192³ on random data, about 250 TFLOP/s on an A100, of 271 at the shape that is best;
#: unfused: the counted bytes; peer: nccl-tests on a node of 8 A100, about 230 of 300 GB/s.
UNFITTED: Final = Calibration(gemm=0.92, unfused=1.0, peer=0.77)
