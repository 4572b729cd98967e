"""Passes that insert actions: 2BW's updates, and swaps to the host; BPipe's is in :mod:`evenpipe.schedule.bpipe`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from evenpipe.schedule.actions import (
    BACKWARD,
    COMPUTE,
    EVICT,
    FINISHING,
    FORWARD,
    INPUT_GRADIENT,
    SWAP_IN,
    SWAP_OUT,
    UPDATE,
    Action,
    ScheduleError,
)
from evenpipe.schedule.schedule import Schedule

__all__ = [
    "batch_of",
    "required_version",
    "returns_beside",
    "swapped_at_once",
    "swapping",
    "with_swaps",
    "with_updates",
]


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
    """``schedule`` with each batch's update in its place; those of the last batch come when all is done.

    ``update_follows(batch)`` is the micro-batch after whose forward, on every stage, the update of ``batch`` is
    finished.
    """
    updates = {update_follows(batch): Action(UPDATE, batch) for batch in range(schedule.batches - 1)}
    last = Action(UPDATE, schedule.batches - 1)
    rows = tuple((*_insert(row, updates), last) for row in schedule.actions)
    return replace(schedule, actions=rows, weight_versions=2)


def _insert(row: tuple[Action, ...], updates: dict[int, Action]) -> Iterator[Action]:
    for action in row:
        yield action
        if action.kind == FORWARD and action.micro_batch in updates:
            yield updates[action.micro_batch]


def with_swaps(schedule: Schedule, positions: Collection[int]) -> Schedule:
    """``schedule`` in which the parts of the model at these ``positions`` swap some tensors of every micro-batch.

    They start to leave right after the forward. They start to come back one action before the backward where that is a
    forward, beside which the link then works: no earlier, for in the backward before it the stage holds what comes back
    of that one's micro-batch, and later memory would have to be free for both. A unit that is evicted leaves what is
    swapped behind on its own host, and has it back when it is loaded: no tensor moves twice.

    Raises :class:`ScheduleError` for a position that the model does not have.
    """
    parts = schedule.places.order
    odd = next((position for position in positions if not 0 <= position < len(parts)), None)
    if odd is not None:
        raise ScheduleError(f"swaps={odd}: the model has parts 0 to {len(parts) - 1}")
    rows = []
    for stage, row in enumerate(schedule.actions):
        chunks = {parts[position].chunk for position in positions if parts[position].stage == stage}
        rows.append(tuple(_swapping(row, chunks)) if chunks else row)
    return replace(schedule, actions=tuple(rows))


def swapping(schedule: Schedule) -> tuple[int, ...]:
    """Return the positions of the model's parts that do so in ``schedule``."""
    rows = enumerate(schedule.actions)
    swapped = {(stage, action.chunk) for stage, row in rows for action in row if action.kind == SWAP_OUT}
    parts = enumerate(schedule.places.order)
    return tuple(position for position, part in parts if (part.stage, part.chunk) in swapped)


def swapped_at_once(row: Sequence[Action]) -> dict[int, int]:
    """By chunk of a stage with these actions, the most units that are between their forward and their last backward.

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
    """Return whether what a backward's unit swapped comes back beside the compute action before it.

    It does beside another unit's forward.
    """
    return last is not None and last.kind == FORWARD and last.unit != action.unit


def _swapping(row: Sequence[Action], chunks: Collection[int]) -> Iterator[Action]:
    evicted = {action.unit for action in row if action.kind == EVICT}
    before: dict[int, Action] = {}
    last = -1  # the last compute action so far
    for at, action in enumerate(row):
        if action.kind not in COMPUTE:
            continue
        if action.kind in (BACKWARD, INPUT_GRADIENT) and action.chunk in chunks and action.unit not in evicted:
            beside = returns_beside(row[last] if last >= 0 else None, action)
            before[last if beside else at] = Action(SWAP_IN, *action.unit)
        last = at
    for at, action in enumerate(row):
        if at in before:
            yield before[at]
        yield action
        if action.kind == FORWARD and action.chunk in chunks:
            yield Action(SWAP_OUT, *action.unit)
