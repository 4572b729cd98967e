"""Brings a value from every rank to rank 0."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from evenpipe.runtime.timeout import job_timeout

__all__ = ["gather"]


def gather(value: Any, timeout: timedelta | None = None) -> list[Any] | None:
    """All ranks' values, as JSON has them, in order of rank, on rank 0; None elsewhere.

    Through the store in which the ranks once found each other: whatever the backend, this opens no connection between
    ranks and takes no memory of a GPU, however many they are, and only rank 0 waits. Raises DistStoreError on rank 0
    when a rank's value has not come after `timeout` (default: the job's).
    """
    root = PrefixStore("evenpipe/gather/", _get_default_store())
    # A rank may be here again before rank 0 has read what it left the last time.
    store = PrefixStore(f"{root.add(f'gathered/{dist.get_rank()}', 1)}/", root)
    if dist.get_rank() != 0:
        store.set(str(dist.get_rank()), json.dumps(value))
        return None
    values = [json.loads(json.dumps(value))]
    for rank in map(str, range(1, dist.get_world_size())):
        store.wait([rank], timeout or job_timeout())
        values.append(json.loads(store.get(rank)))
        store.delete_key(rank)
    return values
