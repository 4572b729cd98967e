"""One device for all of a process' gloo groups, for jobs that make groups by the hundred."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d

__all__ = ["share_device"]


def share_device() -> None:
    """Groups made from now on share a device, and with it the thread that listens to their sockets.

    Otherwise each has a thread of its own, which wakes a hundred times a second for as long as the group lives:
    Megatron's groups outlive its parallel state. Call it in the process that makes the groups.
    """
    devices = [ProcessGroupGloo.create_default_device()]

    class Sharing(ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = ProcessGroupGloo._Options()
            options._devices, options._timeout = devices, timeout
            super().__init__(store, rank, size, options)

    dist.ProcessGroupGloo = distributed_c10d.ProcessGroupGloo = Sharing
