"""What carries a plan out, as a search needs to know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from evenpipe.planner.run import Placement, Recompute
from evenpipe.schedule import NEEDS, Need, Spec

__all__ = ["Engine"]


@dataclass(frozen=True)
class Engine:
    """``called`` is its name in a line; ``offers``: what schedules may need of it.

    scopes: what it can recompute. placements: in which orders it numbers ranks. uneven: its stages may have different
    numbers of layers. context: it divides the sequence. delayed_sharded: schedules without flushes go together with
    tensor and expert parallelism.
    """

    called: str
    offers: frozenset[Need]
    scopes: tuple[Recompute, ...] = get_args(Recompute)
    placements: tuple[Placement, ...] = get_args(Placement)
    uneven: bool = True
    context: bool = True
    delayed_sharded: bool = True

    def lacks(self, spec: Spec) -> str:
        """What it does not offer of what the schedule needs, in words; empty where it runs it."""
        return " and ".join(NEEDS[need] for need in NEEDS if need in spec.needs - self.offers)
