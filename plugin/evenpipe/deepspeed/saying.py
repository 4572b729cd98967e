"""Lines for people."""

from __future__ import annotations

import sys

import torch.distributed as dist

__all__ = ["say", "tell"]


def tell(line: str) -> None:
    """Say `line` once for the job."""
    if dist.get_rank() == 0:
        say(line)


def say(line: str) -> None:
    """On standard error; DeepSpeed's logger hides what is no warning."""
    print(f"evenpipe: {line}", file=sys.stderr, flush=True)
