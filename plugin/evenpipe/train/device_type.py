"""What the processes of a run on this machine compute on."""

from __future__ import annotations

__all__ = ["device_type"]


def device_type(world_size: int) -> str:
    """ "cuda" with a GPU for every process, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= world_size else "cpu"
