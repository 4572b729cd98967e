"""What each framework's engine carries out, as a plan needs to know it."""

from __future__ import annotations

from typing import Final

from evenpipe.deepspeed.section import OFFERS
from evenpipe.planner.descriptions import Framework
from evenpipe.planner.search.question import Engine
from evenpipe.train.engines import ENGINES

__all__ = ["engine_of"]

#: Frameworks whose stages all have as many layers (BPipe §4.2, L mod p = 0; PipeDream-2BW §3.3), and that divide no
#: sequence.
_OLDER: Final = ("megatron-v3", "pipedream-2bw")


def engine_of(framework: Framework) -> Engine:
    """DeepSpeed recomputes whole layers, its topology has replicas before stages, and 2bw's must not divide layers
    (`deepspeed/unsupported.py`); the others are Megatron-LM's.
    """
    if framework.name == "deepspeed":
        return Engine("DeepSpeed", OFFERS, ("none", "full"), ("replicas",), context=False, delayed_sharded=False)
    older = framework.name in _OLDER
    return Engine("Megatron", ENGINES["evenpipe"].offers, uneven=not older, context=not older)
