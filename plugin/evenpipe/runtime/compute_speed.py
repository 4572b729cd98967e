"""How fast a device computes, measured by a matrix product."""

from __future__ import annotations

import time
from typing import Final

import torch

from evenpipe.runtime import streams

__all__ = ["matrix_flops"]

_LONG_ENOUGH_SECONDS: Final = 0.005
# A GPU is busy with fewer; a CPU takes seconds for more.
_FIRST_ROWS_ON_CPU: Final = 16
#: A row that takes as long is measured alone: processors without instructions for a dtype take seconds for 16 rows.
_SLOW_SECONDS: Final = 0.1
# A host may be busy with something else during one of them: the fastest counts.
_ROUNDS: Final = 5


def matrix_flops(device: torch.device, dtype: torch.dtype, rows: int, inner: int, columns: int) -> float:
    """Return floating-point operations per second in products of (rows, inner) and (inner, columns).

    Takes some 50 ms, with fewer rows on slow devices; more where one row takes 100 ms. Draws no random numbers.
    """
    left = torch.ones(rows, inner, dtype=dtype, device=device)
    right = torch.ones(inner, columns, dtype=dtype, device=device)
    product = torch.empty(rows, columns, dtype=dtype, device=device)

    def seconds(rows: int, times: int) -> float:
        torch.matmul(left[:rows], right, out=product[:rows])  # the first product of a shape also loads its kernel
        streams.synchronize(device)
        start = time.perf_counter()
        for _ in range(times):
            torch.matmul(left[:rows], right, out=product[:rows])
        streams.synchronize(device)
        return time.perf_counter() - start

    if device.type != "cuda" and (taken := seconds(1, 1)) > _SLOW_SECONDS:
        return 2 * inner * columns / taken
    part, times = rows if device.type == "cuda" else min(rows, _FIRST_ROWS_ON_CPU), 1
    while (taken := seconds(part, times)) < _LONG_ENOUGH_SECONDS:
        part, times = (min(rows, 4 * part), times) if part < rows else (part, 4 * times)
    taken = min(taken, *(seconds(part, times) for _ in range(_ROUNDS - 1)))
    return 2 * part * inner * columns * times / taken
