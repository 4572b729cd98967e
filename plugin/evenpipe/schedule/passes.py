"""Passes that insert actions: 2BW's updates, and swaps to the host; BPipe's is in :mod:`evenpipe.schedule.bpipe`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeAlias

from evenpipe.schedule.actions import (
    BACKWARD,
    COMPUTE,
    EVICT,
    FINISHING,
    FORWARD,
    INPUT_GRADIENT,
    LOAD,
    SWAP_IN,
    SWAP_OUT,
    UPDATE,
    Action,
    ScheduleError,
    Unit,
)
from evenpipe.schedule.schedule import Schedule

__all__ = [
    "GAINING",
    "LEVELS",
    "Level",
    "LevelsOfStages",
    "Swaps",
    "awaited_swaps",
    "batch_of",
    "most_whole",
    "required_version",
    "returns_beside",
    "swapped_at_once",
    "swapping",
    "swapping_at",
    "whole_and_away",
    "with_swaps",
    "with_updates",
    "with_updates_in_place",
]

#: Which units of a stage swap: none; those that gain by it, beside compute; or, for the least memory, every unit that
#: computes something else before its backward, back just before it, so that the stage waits for copies both ways.
Level: TypeAlias = Literal["none", "gaining", "late"]
GAINING: Final = "gaining"
#: From the fastest to the one that holds least.
LEVELS: Final[tuple[Level, ...]] = ("none", GAINING, "late")


@dataclass(frozen=True)
class LevelsOfStages:
    """The level of swaps of each stage."""

    levels: tuple[Level, ...]


#: What swaps: all of the model's parts at these positions, the same level on every stage, or a level for each.
Swaps: TypeAlias = Collection[int] | Level | LevelsOfStages


def batch_of(micro_batch: int, micro_batches: int) -> int:
    """Return the batch of a micro-batch that is numbered along a stream of batches of so many; both count from 0.

    PipeDream-2BW's ⌊(k − 1)/m⌋ (§3.1), whose k counts from 1.
    """
    return micro_batch // micro_batches


def required_version(batch: int) -> int:
    """Return the weight version that all micro-batches of ``batch`` use, forward and backward.

    ``batch`` counts from 0 over all streams, not from where a stream was begun anew.

    "the weight version to be used for microbatch k is max(⌊(k − 1)/m⌋ − 1, 0)" (PipeDream-2BW §3.1, k from 1).
    """
    return max(batch - 1, 0)


def with_updates(schedule: Schedule, update_follows: Callable[[int], int]) -> Schedule:
    """Return ``schedule`` with each batch's update in its place; those of the last batch come when all is done.

    ``update_follows(batch)`` is the micro-batch after whose forward, on every stage, the update of ``batch`` is
    finished.
    """
    updates = {update_follows(batch): Action(UPDATE, batch) for batch in range(schedule.batches - 1)}
    last = Action(UPDATE, schedule.batches - 1)
    rows = tuple((*_insert(row, updates), last) for row in schedule.actions)
    return replace(schedule, actions=rows, weight_versions=2)


def with_updates_in_place(schedule: Schedule) -> Schedule:
    """Return ``schedule`` in which each stage updates its only weights right after its own last backward of a batch."""
    count = schedule.micro_batches * schedule.chunks

    def updated(row: tuple[Action, ...]) -> Iterator[Action]:
        left = [count] * schedule.batches
        for action in row:
            yield action
            if action.kind in FINISHING:
                batch = batch_of(action.micro_batch, schedule.micro_batches)
                left[batch] -= 1
                if not left[batch]:
                    yield Action(UPDATE, batch)

    return replace(schedule, actions=tuple(tuple(updated(row)) for row in schedule.actions))


def _insert(row: tuple[Action, ...], updates: dict[int, Action]) -> Iterator[Action]:
    for action in row:
        yield action
        if action.kind == FORWARD and action.micro_batch in updates:
            yield updates[action.micro_batch]


def with_swaps(schedule: Schedule, swaps: Swaps) -> Schedule:
    """Return ``schedule`` in which units of the parts of the model at these positions swap tensors to the host.

    They start to leave right after the forward. They start to come back one action before the backward where that is a
    forward, beside which the link then works: no earlier, for in the backward before it the stage holds what comes back
    of that one's micro-batch, and later memory would have to be free for both. A unit that is evicted leaves what is
    swapped behind on its own host, and has it back when it is loaded: no tensor moves twice.

    A :data:`Level` names units of any part: :func:`swapping_at`. For one level of all stages, a schedule that swaps is
    returned as it is.

    Raises :class:`ScheduleError` for a position that the model does not have.
    """
    if isinstance(swaps, str) and SWAP_OUT in schedule.table.letters:
        return schedule
    if isinstance(swaps, str):
        swaps = LevelsOfStages((swaps,) * schedule.stages)
    if isinstance(swaps, LevelsOfStages):
        rows_at = zip(schedule.actions, swaps.levels, strict=True)
        return replace(schedule, actions=tuple(swapping_at(level, row) for row, level in rows_at))
    parts = schedule.places.order
    odd = next((position for position in swaps if not 0 <= position < len(parts)), None)
    if odd is not None:
        raise ScheduleError(f"swaps={odd}: the model has parts 0 to {len(parts) - 1}")
    rows = []
    for stage, row in enumerate(schedule.actions):
        chunks = {parts[position].chunk for position in swaps if parts[position].stage == stage}
        units = {action.unit for action in row if action.kind == FORWARD and action.chunk in chunks}
        rows.append(_swapping(row, units, room=0) if units else row)
    return replace(schedule, actions=tuple(rows))


def swapping_at(level: Level, row: tuple[Action, ...]) -> tuple[Action, ...]:
    """Return a stage's actions with the swaps of a level.

    :data:`GAINING`: of units that have time to leave, to be away and to come back, each beside compute of another unit.
    They come back beside a backward too, if the stage then has room (:func:`most_whole`). A stage that would hold as
    many whole units as before swaps nothing, unless it evicts, when its partner then has less to hold.
    """
    if level == "none":
        return row
    begun: dict[Unit, int] = {}  # the place of each unit's forward among the compute actions
    evicted = {action.unit for action in row if action.kind == EVICT}
    units, apart = set(evicted), 3 if level == GAINING else 1
    for at, action in enumerate(action for action in row if action.kind in COMPUTE):
        if action.kind == FORWARD:
            begun[action.unit] = at
        elif action.kind in (BACKWARD, INPUT_GRADIENT) and at - begun[action.unit] > apart:
            units.add(action.unit)
    if not units:
        return row
    if level == "late":
        return _swapping(row, units, room=0, late=True)
    swapping = _swapping(row, units, most_whole(_swapping(row, units, room=0)))
    return swapping if evicted or most_whole(swapping) < most_whole(row) else row


def most_whole(row: Sequence[Action]) -> int:
    """Return the most units of its own that a stage with these actions has whole when one is forwarded.

    One is whole from its forward on, but for the time between a swap out and the swap in, or load. It has left when the
    next forward begins.
    """
    whole, most = set[Unit](), 0
    leaving = set[Unit]()
    for action in row:
        if action.kind == FORWARD:
            whole = whole - leaving | {action.unit}
            most = max(most, len(whole))
        elif action.kind == SWAP_OUT:
            leaving.add(action.unit)
        elif action.kind in (SWAP_IN, LOAD):
            leaving.discard(action.unit)
            whole.add(action.unit)
        elif action.kind in FINISHING:
            whole.discard(action.unit)
    return most


def awaited_swaps(row: Sequence[Action]) -> dict[int, list[int]]:
    """Return, by an action's place in ``row``, the places of the swaps out that have to be complete before it.

    They are a unit's own, and as many of the oldest as keep to :func:`most_whole` when a unit is forwarded or comes
    back.
    """
    return {moment.at: moment.awaited for moment in _moments(row) if moment.awaited}


def whole_and_away(row: Sequence[Action]) -> Iterator[tuple[frozenset[Unit], frozenset[Unit]]]:
    """Yield which units of its own a stage has whole, and which swapped, whenever one is forwarded or comes back.

    No swap out is complete before somebody waits for it.
    """
    return ((moment.whole, moment.away) for moment in _moments(row))


class _Moment(NamedTuple):
    """A unit is forwarded or comes back: at this place in the row, after the swaps out that are `awaited`."""

    at: int
    awaited: list[int]
    whole: frozenset[Unit]
    away: frozenset[Unit]


def _moments(row: Sequence[Action]) -> Iterator[_Moment]:
    most = most_whole(row)
    whole, away, leaving = set[Unit](), set[Unit](), dict[Unit, int]()
    for at, action in enumerate(row):
        if action.kind == SWAP_OUT:
            leaving[action.unit] = at
        elif action.kind in FINISHING:
            whole.discard(action.unit)
        elif action.kind in (FORWARD, SWAP_IN, LOAD):
            first = [action.unit] if action.unit in leaving else []
            oldest = [unit for unit in leaving if unit not in first]
            due = first + oldest[: max(0, len(whole - {*first}) + 1 - most)]
            awaited = [leaving.pop(unit) for unit in due]
            whole = whole - {*due} | {action.unit}
            away = (away | {*due}) - {action.unit}
            yield _Moment(at, awaited, frozenset(whole), frozenset(away))


def swapping(schedule: Schedule) -> tuple[int, ...]:
    """Return the positions of the model's parts that swap in ``schedule``."""
    rows = enumerate(schedule.actions)
    swapped = {(stage, action.chunk) for stage, row in rows for action in row if action.kind == SWAP_OUT}
    parts = enumerate(schedule.places.order)
    return tuple(position for position, part in parts if (part.stage, part.chunk) in swapped)


def swapped_at_once(row: Sequence[Action]) -> dict[int, int]:
    """Return, by chunk of a stage with these actions, the most units between their forward and their last backward.

    So many may be on the host at once, evicted ones among them, for each leaves some tensors there.
    """
    most, now = Counter[int](), Counter[int]()
    for action in row:
        if action.kind == FORWARD:
            now[action.chunk] += 1
            most[action.chunk] = max(most[action.chunk], now[action.chunk])
        elif action.kind in FINISHING:
            now[action.chunk] -= 1
    return dict(most)


def returns_beside(last: Action | None, action: Action) -> bool:
    """Return whether a backward's unit comes back beside the compute action before it: another unit's forward."""
    return last is not None and last.kind == FORWARD and last.unit != action.unit


def _swapping(row: Sequence[Action], units: Collection[Unit], room: int, late: bool = False) -> tuple[Action, ...]:
    """Return ``row`` with swaps of these units.

    They come back beside a backward if fewer than ``room`` are whole, and ``late`` beside nothing.
    """
    evicted = {action.unit for action in row if action.kind == EVICT}
    back = defaultdict[int, list[Action]](list)  # by the place before which it starts to come
    whole, leaving = set[Unit](), set[Unit]()  # when the compute action before starts, whose place is `last`
    last = -1
    for at, action in enumerate(row):
        if action.kind not in COMPUTE:
            continue
        before = row[last] if last >= 0 else None
        if action.kind in (BACKWARD, INPUT_GRADIENT) and action.unit in units:
            beside = returns_beside(before, action) and not late
            if before is not None and before.kind != FORWARD and before.unit != action.unit:
                beside = len(whole) < room
            if action.unit not in evicted:
                back[last if beside else at].append(Action(SWAP_IN, *action.unit))
            whole.add(action.unit)
        whole -= leaving
        leaving.clear()
        if before is not None and before.kind == FORWARD:
            whole.add(before.unit)
            leaving.update({before.unit} if before.unit in units else ())
        elif before is not None and before.kind in FINISHING:
            whole.discard(before.unit)
        last = at
    merged: list[Action] = []
    for at, action in enumerate(row):
        merged += [*back[at], action]
        if action.kind == FORWARD and action.unit in units:
            merged.append(Action(SWAP_OUT, *action.unit))
    return tuple(merged)
