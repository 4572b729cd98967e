"""How long the user lets ranks wait for each other."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

__all__ = ["job_timeout"]


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
