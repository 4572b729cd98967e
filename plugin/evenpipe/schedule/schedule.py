"""A schedule: for each stage, which actions happen in which order. An immutable value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from evenpipe.schedule.actions import EVICT, UPDATE, Action, parse
from evenpipe.schedule.residency import Residency, residency

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """What every stage does in one batch, or, without a flush, in a stream of so many ``batches``.

    ``micro_batches`` are those of one batch; along a stream they are numbered on.
    ``bound`` is the promise that no stage ever holds more than so many live units (micro-batch × model chunk), own
    plus accepted, those in flight counted on both sides.
    ``group_size`` is kFkB's k: so many forwards, or backwards, in a row; other schedules group nothing.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int
    bound: int
    actions: tuple[tuple[Action, ...], ...]
    batches: int = 1
    group_size: int = 1

    @classmethod
    def parse(cls, rows: Iterable[str], *, name: str = "parsed", bound: int | None = None) -> Schedule:
        """A schedule from one line of space-separated actions per stage; the bound defaults to what it needs."""
        actions = tuple(tuple(parse(word) for word in row.split()) for row in rows)
        units = [action.unit for row in actions for action in row if action.kind != UPDATE]
        micro_batches = 1 + max((unit.micro_batch for unit in units), default=-1)
        chunks = 1 + max((unit.chunk for unit in units), default=0)
        schedule = cls(name, len(actions), micro_batches, chunks, len(units), actions)
        return replace(schedule, bound=max(schedule.peak_live, default=0) if bound is None else bound)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.actions)

    @cached_property
    def evictions(self) -> tuple[int, ...]:
        """Per stage, how many units it evicts."""
        return tuple(sum(action.kind == EVICT for action in row) for row in self.actions)

    @cached_property
    def residencies(self) -> tuple[Residency, ...]:
        """Per stage, what it holds on its way through its actions."""
        return tuple(residency(row, self.bound) for row in self.actions)

    @property
    def peak_live(self) -> tuple[int, ...]:
        """Per stage, the most units live at once, own plus accepted, those in flight counted on both sides."""
        return tuple(held.peak for held in self.residencies)
