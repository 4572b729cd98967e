"""How long the user lets ranks wait for each other."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Final

import torch.distributed as dist

__all__ = ["how_to_raise", "job_timeout"]

#: What a job's timeout is set with, by the module whose presence tells who has set it.
_SET_BY: Final = {
    "evenpipe.train.process": "--timeout-minutes",
    "megatron.training": "--distributed-timeout-minutes",
    "deepspeed": "deepspeed.init_distributed(timeout=...)",
}


def job_timeout() -> timedelta:
    """The timeout of the job's default process group, whoever set it, or torch's default where its backend tells none.

    That is Megatron-LM's --distributed-timeout-minutes and the `timeout` of `deepspeed.init_distributed` or
    `torch.distributed.init_process_group`. Every backend keeps it in the options that it was made with.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed has been started"
    for device in world._device_types:
        backend = world._get_backend(device)
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps gloo's.
        options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return dist.default_pg_timeout


def how_to_raise() -> str:
    """Return what this job's timeout is set with: the flag, or the call, of what has started it."""
    given = (how for module, how in _SET_BY.items() if module in sys.modules)
    return next(given, "torch.distributed.init_process_group(timeout=...)")
