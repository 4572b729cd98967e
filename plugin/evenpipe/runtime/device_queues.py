"""How many queues the GPUs of a pipeline take work from, which is what the order of messages goes by."""

from __future__ import annotations

import os
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from evenpipe.runtime.timeout import job_timeout

__all__ = ["one_queue"]

_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"


def one_queue(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether, on a GPU of any rank, work that is enqueued waits for all that was enqueued before, on any stream.

    All ranks of `group` (None: of the job) call it alike, and get the same answer, whatever their environments say.
    They tell each other through the store in which they once found each other, as a collective would open one more
    communicator. Raises DistStoreError when a rank has not called it within the job's timeout.
    """
    if device.type != "cuda":
        return False
    ranks = dist.get_process_group_ranks(group)
    root = PrefixStore(f"evenpipe/queues/{ranks[0]}-{len(ranks)}/", _get_default_store())
    store = PrefixStore(f"{root.add(f'asked/{dist.get_rank()}', 1)}/", root)
    store.add("one", int(os.environ.get(_CONNECTIONS) == "1"))
    if store.add("told", 1) == len(ranks):
        store.set("found", str(store.add("one", 0)))
    store.wait(["found"], job_timeout())
    return int(store.get("found")) > 0
