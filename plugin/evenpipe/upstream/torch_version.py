"""The oldest torch that EvenPipe trains right on, and what to say of an older one."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Final

__all__ = ["OLDEST_TORCH", "too_old_torch"]

OLDEST_TORCH: Final = (2, 10)
"""All of `tests/runtime` passes on it; of `tests/schedule` all but torch's own pipelines: gloo refused their first
exchange. On 2.7 a store cannot be cloned, so that a wait holds up the heartbeat; 2.6 has no group's `shutdown`."""


def too_old_torch() -> str | None:
    """Return one line that says so of a torch which is too old; None of a newer one, or of none. Imports nothing."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is not None and (int(number[1]), int(number[2])) >= OLDEST_TORCH:
        return None
    oldest = ".".join(map(str, OLDEST_TORCH))
    return f"torch {version} is older than what EvenPipe works with: use {oldest} or newer"
