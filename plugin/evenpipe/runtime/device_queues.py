"""What holds up the devices of a pipeline, which the order of its messages goes by."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Final, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store, _world

from evenpipe.runtime.beats import ANSWER_SECONDS, answered, present
from evenpipe.runtime.heartbeat import Heartbeat
from evenpipe.runtime.timeout import job_timeout
from evenpipe.schedule import Queues, strictest

__all__ = ["groups_over", "queues_line", "queues_of"]

_QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
#: How many a device has if nothing is said, and at most (CUDA C++ Programming Guide, environment variables).
_DEFAULT, _MOST = 8, 32
#: Settings by which a GPU or its host has what is enqueued wait for all that was enqueued before, on any stream.
_SETTINGS: Final[tuple[tuple[str, Queues], ...]] = (
    (_QUEUES, "one"),
    ("CUDA_LAUNCH_BLOCKING", "synchronised"),
)


def queues_of(ranks: Sequence[int], device: torch.device, held_up: Queues, heartbeat: Heartbeat) -> Queues:
    """What holds up the devices of `ranks`, all of which call it alike.

    `held_up`: what holds this one's up whatever its environment says, such as timers that synchronise. All get the same
    answer, the strictest of what holds for any. They tell each other through the store in which
    they once found each other, as a collective would open one more communicator. Raises SilentPeer, with what
    `heartbeat` knows of those missing, when one has not called it within the job's timeout.
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

    with heartbeat.naming(missing, "what devices of the pipeline are like"):
        # A store that does not answer does not time out either.
        answered(lambda: store.wait(keys, timeout), timeout.total_seconds() + ANSWER_SECONDS)
    return strictest(cast(Queues, kind.decode()) for kind in store.multi_get(keys))


def groups_over(backend: str) -> int:
    """Return in how many of the job's groups this process communicates with others over `backend` on its device."""
    own = f"cuda:{backend}"
    return sum(group.size() > 1 and own in config.split(",") for group, config in _world.pg_backend_config.items())


def queues_line(counts: Mapping[str, int], environ: Mapping[str, str]) -> str:
    """Return a line that says how many hardware queues to ask CUDA for; "" where `environ` has enough.

    `counts`: streams by what they are of. Streams that share a queue hold each other up, as all do that pass one. One
    queue is no lack: Megatron demands it with tensor parallelism, and the order of messages goes by it.
    """
    given = environ.get(_QUEUES, "")
    have, need = int(given) if given.isdecimal() else _DEFAULT, min(sum(counts.values()), _MOST)
    if have == 1 or have >= need:
        return ""
    of = ", ".join(f"{count} of {what}" for what, count in counts.items() if count)
    why = f"{_QUEUES}={given}" if given else f"CUDA's default without {_QUEUES}"
    enough = f"{_QUEUES}={need} or more, up to {_MOST}" if need < _MOST else f"{_QUEUES}={_MOST}, the most there are"
    return (
        f"queues: {have} hardware queues of each GPU ({why}) for {sum(counts.values())} streams ({of}), and streams "
        f"that share a queue hold each other up: start with {enough}"
    )
