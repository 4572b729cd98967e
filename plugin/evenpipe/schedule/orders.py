"""Ways to order compute that several schedules share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from evenpipe.schedule.actions import Action, Unit
from evenpipe.schedule.kinds import BACKWARD, FORWARD

__all__ = ["alternate", "units"]

_action = lru_cache(1 << 16)(Action)  # the same on every stage


def units(micro_batches: int) -> list[Unit]:
    """All micro-batches of one model chunk, in order."""
    return [Unit(number) for number in range(micro_batches)]


def alternate(forwards: Sequence[Unit], backwards: Sequence[Unit], warmup: int) -> Iterator[Action]:
    """``warmup`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    for unit in forwards[:warmup]:
        yield _action(FORWARD, *unit)
    for ahead, unit in zip(forwards[warmup:], backwards, strict=False):
        yield _action(FORWARD, *ahead)
        yield _action(BACKWARD, *unit)
    for unit in backwards[len(forwards) - warmup :]:
        yield _action(BACKWARD, *unit)
