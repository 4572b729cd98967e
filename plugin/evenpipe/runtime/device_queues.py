"""How many queues the GPUs of a pipeline take work from, which is what the order of messages goes by."""

from __future__ import annotations

import os
from typing import Final

import torch
import torch.distributed as dist

__all__ = ["one_queue"]

_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"


def one_queue(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether, on a GPU of any rank, work that is enqueued waits for all that was enqueued before, on any stream.

    All ranks of `group` (None: of the job) call it alike, and get the same answer, whatever their environments say.
    """
    if device.type != "cuda":
        return False
    found = torch.tensor([os.environ.get(_CONNECTIONS) == "1"], dtype=torch.int32, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return bool(found.item())
