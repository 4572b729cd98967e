"""What holds up the devices of a pipeline, which the order of its messages goes by."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import sha256
from typing import Final, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from evenpipe.runtime.beats import ANSWER_SECONDS, answered, present
from evenpipe.runtime.pulse import Pulse
from evenpipe.runtime.timeout import job_timeout
from evenpipe.schedule import Queues, strictest

__all__ = ["queues_of"]

#: Settings by which a GPU or its host has what is enqueued wait for all that was enqueued before, on any stream.
_SETTINGS: Final[tuple[tuple[str, Queues], ...]] = (
    ("CUDA_DEVICE_MAX_CONNECTIONS", "one"),
    ("CUDA_LAUNCH_BLOCKING", "synchronised"),
)


def queues_of(ranks: Sequence[int], device: torch.device, held_up: Queues, pulse: Pulse) -> Queues:
    """What holds up the devices of `ranks`, all of which call it alike.

    `held_up`: what holds this one's up whatever its environment says, such as timers that synchronise. All get the same
    answer, the strictest of what holds for any. They tell each other through the store in which
    they once found each other, as a collective would open one more communicator. Raises SilentPeer, with what `pulse`
    knows of those missing, when one has not called it within the job's timeout.
    """
    settings = _SETTINGS if device.type == "cuda" else ()
    own = [held_up, *(kind for setting, kind in settings if os.environ.get(setting) == "1")]
    rank, keys, timeout = dist.get_rank(), [str(rank) for rank in ranks], job_timeout()
    root = PrefixStore(f"evenpipe/queues/{sha256(repr([*ranks]).encode()).hexdigest()}/", _get_default_store())
    # The same ranks may ask again, with other settings.
    store = PrefixStore(f"{root.add(f'asked/{rank}', 1)}/", root)
    store.set(str(rank), strictest(own))

    def missing() -> list[int]:
        come = present(store, keys)
        return [int(key) for key in keys if key not in come]

    with pulse.naming(missing, "what devices of the pipeline are like"):
        # A store that does not answer does not time out either.
        answered(lambda: store.wait(keys, timeout), timeout.total_seconds() + ANSWER_SECONDS)
    return strictest(cast(Queues, kind.decode()) for kind in store.multi_get(keys))
