"""What holds up the devices of a pipeline, which the order of its messages goes by."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import sha256
from typing import Final, get_args

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from evenpipe.runtime.timeout import job_timeout
from evenpipe.schedule import Queues

__all__ = ["queues_of"]

#: Settings by which a GPU or its host has what is enqueued wait for all that was enqueued before, on any stream.
_SETTINGS: Final[tuple[tuple[str, Queues], ...]] = (
    ("CUDA_DEVICE_MAX_CONNECTIONS", "one"),
    ("CUDA_LAUNCH_BLOCKING", "synchronised"),
)
_KINDS: Final[tuple[Queues, ...]] = get_args(Queues)


def queues_of(ranks: Sequence[int], device: torch.device, synchronised: bool = False) -> Queues:
    """What holds up the devices of `ranks`, all of which call it alike.

    `synchronised`: this host waits for its device around compute, as some timers do. All get the same answer, the last
    of `Queues` that holds for any, whatever their environments say. They tell each other through the store in which
    they once found each other, as a collective would open one more communicator. Raises DistStoreError when one has
    not called it within the job's timeout.
    """
    settings = _SETTINGS if device.type == "cuda" else ()
    own: list[Queues] = [kind for setting, kind in settings if os.environ.get(setting) == "1"]
    worst = max(map(_KINDS.index, [*own, "synchronised"] if synchronised else own), default=0)
    root = PrefixStore(f"evenpipe/queues/{sha256(repr([*ranks]).encode()).hexdigest()}/", _get_default_store())
    store = PrefixStore(f"{root.add(f'asked/{dist.get_rank()}', 1)}/", root)
    store.add(str(worst), 1)
    if store.add("told", 1) == len(ranks):
        store.set("found", str(max(kind for kind in range(len(_KINDS)) if store.add(str(kind), 0))))
    store.wait(["found"], job_timeout())
    return _KINDS[int(store.get("found"))]
