"""What each framework's engine carries out, as a plan needs to know it."""

from __future__ import annotations

from typing import Final

from evenpipe.deepspeed.section import OFFERS
from evenpipe.planner.descriptions import Framework
from evenpipe.planner.search.engine import Engine
from evenpipe.train.engines import ENGINES

__all__ = ["engine_of"]

#: Frameworks whose stages all have as many layers (BPipe §4.2, L mod p = 0; PipeDream-2BW §3.3).
_EVEN: Final = ("megatron-v3", "pipedream-2bw")


def engine_of(framework: Framework) -> Engine:
    """DeepSpeed recomputes whole layers, and its topology has replicas before stages; the others are Megatron-LM's."""
    if framework.name == "deepspeed":
        return Engine("DeepSpeed", OFFERS, ("none", "full"), ("replicas",))
    return Engine("Megatron", ENGINES["evenpipe"].offers, uneven=framework.name not in _EVEN)
