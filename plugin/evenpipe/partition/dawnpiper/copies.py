"""Copies of activations and of weights that every stage keeps under a schedule (DawnPiper §3.1, Equation 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenpipe.schedule import (
    INPUT_GRADIENT,
    KINDS,
    WEIGHT_GRADIENT,
    Schedule,
    ScheduleError,
    Size,
    build,
    find,
    returns_beside,
)

__all__ = ["PIPEDREAM", "Copies", "Workload", "copies_of"]

#: The asynchronous schedule that the paper partitions for. It is weighed here, and not trained.
PIPEDREAM = "pipedream"
#: Batches without a flush after which evictions and versions only repeat.
_STREAM = 3
#: The share of a backward that an action is.
_BACKWARD = {"B": 1.0, "D": 0.5, "W": 0.5}


class Workload(NamedTuple):
    """A schedule by its name (or `pipedream`), for m micro-batches, v chunks a stage and groups of k."""

    schedule: str
    micro_batches: int
    chunks: int = 1
    group_size: int = 1
    bpipe: bool = False

    @classmethod
    def of_mode(cls, mode: str, stages: int) -> Workload:
        """Return the paper's settings: `sync`, GPipe with a micro-batch a stage (§5.2.1), and `async`, PipeDream."""
        known = {"sync": cls("gpipe", stages), "async": cls(PIPEDREAM, stages)}
        if mode not in known:
            raise ScheduleError(f"mode={mode}: expected one of {', '.join(known)}")
        return known[mode]


@dataclass(frozen=True, eq=False)
class Copies:
    """The copies of each position: the p·v parts of a model in the order in which a micro-batch passes them.

    owners: the stage of each position. versions: of its weights. live: per stage, rows of (micro-batches of position 0,
    of position 1, …) that it holds at once, own and accepted ones; only rows that no other exceeds everywhere. A row is
    a moment of the schedule, so the most of `live[x] @ saved_bytes` is exactly the stage's peak. left: per stage, as
    many rows: how many of these are between the halves of their backward (Zero Bubble, arXiv 2401.10241, §2), and so
    keep other bytes. between: per position, the least (forwards, backwards) that its stage computes between a
    micro-batch's forward and backward; several where neither is the least. beside: per position, how many backwards its
    stage mostly computes from a forward to its next one, and beside how many forwards swapped storages can come back
    (`schedule.swaps`).
    """

    schedule: str
    owners: tuple[int, ...]
    versions: tuple[int, ...]
    live: tuple[NDArray[np.int64], ...]
    left: tuple[NDArray[np.int64], ...]
    between: tuple[tuple[tuple[float, float], ...], ...]
    beside: tuple[tuple[float, float], ...]

    @property
    def stages(self) -> int:
        return len(self.live)

    @property
    def positions(self) -> int:
        return len(self.owners)

    def most(self, stage: int, position: int) -> int:
        """Return the most micro-batches of a position that a stage holds at once."""
        return int(self.live[stage][:, position].max())

    def moments(self, stage: int, position: int) -> list[tuple[int, int]]:
        """Return how many micro-batches of a position a stage holds whole, and how many of which a half is done.

        Only moments that no other exceeds in both.
        """
        left = self.left[stage][:, position]
        both = _largest(np.stack([self.live[stage][:, position] - left, left], axis=1))
        return [(whole, half) for whole, half in both.tolist() if whole or half]

    def peak(self, stage: int, kept: NDArray[Any], left: NDArray[Any]) -> float:
        """Return a stage's most bytes, where a micro-batch of each position keeps so many, and then leaves so many."""
        return float(self.weighed(stage, kept, left).max())

    def weighed(self, stage: int, kept: NDArray[Any], left: NDArray[Any]) -> NDArray[Any]:
        """Return the bytes of each of a stage's rows; see `peak`."""
        weighed: NDArray[Any] = self.live[stage] @ kept + self.left[stage] @ (left - kept)
        return weighed

    @property
    def own(self) -> tuple[int, ...]:
        """Per position, the most micro-batches of it that its own stage holds."""
        return tuple(self.most(stage, position) for position, stage in enumerate(self.owners))

    @property
    def separable(self) -> bool:
        """Return whether every stage holds micro-batches of one position only, so that each can be weighed alone."""
        return all(np.count_nonzero(rows.any(axis=0)) <= 1 for rows in self.live)


def copies_of(workload: Workload, stages: int) -> Copies:
    """Return the copies of the verified schedule. Raises ScheduleError, one line, where there is none of this size."""
    if workload.schedule == PIPEDREAM:
        return _pipedream(workload, stages)
    spec = find(workload.schedule)
    batches = _STREAM if "stream" in spec.needs else 1
    size = Size(stages, workload.micro_batches, workload.chunks, workload.group_size, batches)
    schedule = build(spec, size, bpipe=workload.bpipe).schedule
    owners = tuple(place.stage for place in schedule.places.order)
    live, left = zip(*(_held(schedule, stage) for stage in range(stages)), strict=True)
    return Copies(
        schedule.name,
        owners,
        (schedule.weight_versions,) * len(owners),
        live,
        left,
        tuple(_between(schedule, place.stage, place.chunk) for place in schedule.places.order),
        tuple(_beside(schedule, place.stage, place.chunk) for place in schedule.places.order),
    )


def _pipedream(workload: Workload, stages: int) -> Copies:
    """Equation 2: stage x of ℓ, counted from 1, keeps ℓ − x + 1 copies of activations and of weights."""
    if stages < 1 or workload.chunks != 1 or workload.group_size != 1 or workload.bpipe:
        raise ScheduleError(f"schedule={PIPEDREAM}: has stages ≥ 1 with one chunk each, no groups and no bpipe")
    kept = np.arange(stages, 0, -1)
    between = tuple(((float(copies - 1),) * 2,) for copies in kept.tolist())
    live = tuple(np.diag(kept)[stage : stage + 1] for stage in range(stages))
    beside = ((1.0, 1.0),) * (stages - 1) + ((1.0, 0.0),)
    none = tuple(map(np.zeros_like, live))
    return Copies(PIPEDREAM, tuple(range(stages)), tuple(kept.tolist()), live, none, between, beside)


def _held(schedule: Schedule, stage: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of `Copies.live` and `Copies.left`: a stage's walk, as `evenpipe.simulate` weighs it.

    A unit is held from the start of the action that brings it. Compute that ends it lets go of it afterwards; a
    departure is complete when an action has to wait for it (`Schedule.residencies`).
    """
    table = schedule.table
    rows = table.of(stage)
    kinds = [KINDS[chr(kind)] for kind in table.kind[rows].tolist()]  # type: ignore[index]
    owner = np.where(table.evictor[rows] >= 0, table.evictor[rows], stage)
    position = np.array(
        [
            -1 if row.of_batch else schedule.places.position(*at)
            for row, *at in zip(kinds, owner.tolist(), table.chunk[rows].tolist(), strict=True)
        ]
    )
    held = np.array([row.held for row in kinds])
    leaves = np.array([row.held < 0 and row.link is not None for row in kinds])
    change = np.zeros((len(kinds) + 1, len(schedule.places.order)), np.int64)
    arrives, ends = np.flatnonzero(held > 0), np.flatnonzero((held < 0) & ~leaves)
    np.add.at(change, (arrives, position[arrives]), 1)
    np.add.at(change, (ends + 1, position[ends]), -1)
    departures = np.flatnonzero(leaves)
    gone = schedule.residencies[stage].gone
    waited = np.searchsorted(gone, np.arange(1, int(gone.max(initial=0)) + 1))
    np.add.at(change, (waited, position[departures[: len(waited)]]), -1)
    halves = np.zeros_like(change)
    for sign, kind in ((1, INPUT_GRADIENT), (-1, WEIGHT_GRADIENT)):
        done = np.flatnonzero(table.kind[rows] == ord(kind))
        np.add.at(halves, (done + 1, position[done]), sign)
    left = np.cumsum(halves, axis=0)
    both = np.hstack([np.cumsum(change, axis=0) - left, left])
    moments = _largest(both[np.union1d(arrives, np.flatnonzero((halves > 0).any(axis=1)))])
    whole, left = np.hsplit(moments, 2)
    return whole + left, left


def _largest(rows: NDArray[Any]) -> NDArray[Any]:
    """Return the rows that no other one exceeds or equals everywhere, sorted."""
    rows = np.unique(rows, axis=0)
    within = np.logical_and.reduce(rows[:, None] <= rows[None], axis=2)
    np.fill_diagonal(within, False)
    return rows.compress(~within.any(axis=1), axis=0)


def _between(schedule: Schedule, stage: int, chunk: int) -> tuple[tuple[float, float], ...]:
    """Return the least (forwards, backwards) between the forward and the backward of units of one chunk."""
    started: dict[int, tuple[float, float]] = {}
    forwards, backwards, computed = 0.0, 0.0, list[tuple[float, float]]()
    for action in schedule.actions[stage]:
        mine = action.chunk == chunk
        if action.kind in ("B", "D") and mine:
            begun = started[action.micro_batch]
            computed.append((forwards - begun[0], backwards - begun[1]))
        forwards += action.kind == "F"
        backwards += _BACKWARD.get(action.kind, 0.0)
        if action.kind == "F" and mine:
            started[action.micro_batch] = forwards, backwards
    least = sorted((-_largest(-np.array(computed))).tolist())
    return tuple((forwards, backwards) for forwards, backwards in least)


def _beside(schedule: Schedule, stage: int, chunk: int) -> tuple[float, float]:
    """Return `Copies.beside` of most of a chunk's units. Evicted units come back just in time."""
    computed = [action for action in schedule.actions[stage] if action.kind == "F" or action.kind in _BACKWARD]
    evicted = {action.unit for action in schedule.actions[stage] if action.kind == "E"}
    after, before = list[float](), list[float]()
    backwards: float | None = None  # since the last forward of the chunk
    for last, action in zip([None, *computed], computed, strict=False):
        if action.kind == "F":
            after += [] if backwards is None else [backwards]
            backwards = 0.0 if action.chunk == chunk else None
            continue
        backwards = None if backwards is None else backwards + _BACKWARD[action.kind]
        if action.kind in ("B", "D") and action.chunk == chunk:
            before.append(float(returns_beside(last, action) and action.unit not in evicted))
    return _mostly(after), _mostly(before)


def _mostly(values: Sequence[float]) -> float:
    """Return the most frequent value, of several the least; one backward where nothing follows."""
    counted = Counter(values)
    return min(counted, key=lambda value: (-counted[value], value), default=1.0)
