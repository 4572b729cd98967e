"""How many queues a GPU takes work from, and why groups of micro-batches need more than one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["ONE_QUEUE", "one_queue"]

_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
#: What to say where groups are asked for.
ONE_QUEUE: Final = (
    f"{_CONNECTIONS}=1 gives a GPU one queue, in which receives that are posted ahead, one behind the other, hold up "
    "compute that they wait for: set it to 8 (tensor parallelism may ask for 1), or use 1f1b"
)


def one_queue(device_type: str, environment: Mapping[str, str]) -> bool:
    """Whether work that is enqueued waits for all that was enqueued before, on any stream."""
    return device_type == "cuda" and environment.get(_CONNECTIONS) == "1"
