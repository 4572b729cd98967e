"""The memory that a tuned run may use on each device."""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist

__all__ = ["limit_bytes"]

#: Of a GPU's memory; the rest goes to CUDA, to communicators, to workspaces, and to gaps between tensors.
_FOR_TENSORS: Final = 0.9


def limit_bytes(gib: float | None, device: torch.device) -> int:
    """`gib`, or, on a GPU, what the smallest one has for tensors; all ranks call it, and get the same."""
    if gib is not None:
        return int(gib * 2**30)
    _, total = torch.cuda.mem_get_info(device)
    limit = torch.tensor([_FOR_TENSORS * total], dtype=torch.float64, device=device)
    dist.all_reduce(limit, dist.ReduceOp.MIN)
    return int(limit.item())
