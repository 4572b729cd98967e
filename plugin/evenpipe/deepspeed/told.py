"""Lines for people."""

from __future__ import annotations

import sys

import torch.distributed as dist

__all__ = ["tell"]


def tell(line: str) -> None:
    """Say `line` once for the job, on standard error; DeepSpeed's logger hides what is no warning."""
    if dist.get_rank() == 0:
        print(f"evenpipe: {line}", file=sys.stderr, flush=True)
