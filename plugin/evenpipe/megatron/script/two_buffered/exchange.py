"""An exchange in the background among all ranks of a Megatron job."""

from __future__ import annotations

import torch
import torch.distributed as dist

from evenpipe.runtime.exchange import Exchange

__all__ = ["exchange_among_all"]


def exchange_among_all(columns: int) -> Exchange:
    """All ranks make it at the same point."""
    world = dist.group.WORLD
    assert world is not None, "Megatron has started torch.distributed"
    return Exchange(world, columns, torch.device(torch.cuda.current_device()))
