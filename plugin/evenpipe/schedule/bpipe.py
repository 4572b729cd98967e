"""The BPipe pass: evict and load between paired stages so that no stage holds more than a bound (BPipe §3)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from evenpipe.schedule.actions import (
    ACCEPT,
    BACKWARD,
    EVICT,
    FINISHING,
    FORWARD,
    INPUT_GRADIENT,
    KINDS,
    LOAD,
    RETURN,
    SWAP_IN,
    SWAP_OUT,
    Action,
    Kind,
    ScheduleError,
)
from evenpipe.schedule.order import Queues, boundaries
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.table import Column, own_peak
from evenpipe.schedule.topology import partner

__all__ = ["balance", "swapped"]


class _Transfer(NamedTuple):
    """An eviction or load, just before the evictor's compute action ``slot``, of the unit of its backward ``used``."""

    slot: int
    kind: Kind
    used: int


def balance(schedule: Schedule, bound: int | Sequence[int], queues: Queues = "many") -> Schedule:
    """Return the same compute orders with transfers added, so that no stage holds more than ``bound`` live units.

    ``bound``: one for all stages, or one for each. With one queue, a load that waits for its room holds up the compute
    behind it, so it starts after that. Works on any compute orders. Raises :class:`ScheduleError` if an evictor cannot
    get below the bound; whether every acceptor and the middle stage do, :func:`evenpipe.schedule.verify` decides.
    """
    table, stages = schedule.table, schedule.stages
    bounds = (bound,) * stages if isinstance(bound, int) else tuple(bound)
    ends = boundaries(schedule)
    rows = list(schedule.actions)
    action_of = cache(Action)  # evictors evict and load the same micro-batches
    for evictor in range(stages // 2):
        if own_peak(table.kind[table.of(evictor)]) <= bounds[evictor]:
            continue
        acceptor, row, ended = partner(evictor, stages), rows[evictor], ends[evictor].tolist()
        trades = [
            (slot, kind, row[used][1:3], _boundary(slot, ended))
            for slot, kind, used in _plan(row, ended, bounds[evictor], evictor, early=queues != "one")
        ]
        rows[evictor] = _insert(row, [(slot, action_of(kind, *unit)) for slot, kind, unit, _ in trades])
        accepting = [
            (Action(ACCEPT if kind == EVICT else RETURN, *unit, evictor), issued) for _, kind, unit, issued in trades
        ]
        kinds = table.kind[table.of(acceptor)]
        rows[acceptor] = _insert(rows[acceptor], _receive(kinds, ends[acceptor].tolist(), accepting, bounds[acceptor]))
    of_stages = () if isinstance(bound, int) else bounds
    return replace(schedule, bound=max(bounds), bounds=of_stages, actions=tuple(rows))


def swapped(schedule: Schedule, bounds: Sequence[int]) -> Schedule:
    """Return the same compute orders with swaps, so that no stage has more than its bound of units that are whole.

    Units go to the stage's own host as others go to a partner, and stay live. A swap in whose room is still leaving
    would hold up compute, so it starts after that. Raises :class:`ScheduleError` as :func:`balance` does.
    """
    kinds: dict[Kind, Kind] = {EVICT: SWAP_OUT, LOAD: SWAP_IN}
    rows = []
    for stage, (row, ends, bound) in enumerate(zip(schedule.actions, boundaries(schedule), bounds, strict=True)):
        trades = _plan(row, ends.tolist(), bound, stage, early=False)
        rows.append(_insert(row, [(slot, Action(kinds[kind], *row[used][1:3])) for slot, kind, used in trades]))
    return replace(schedule, actions=tuple(rows))


def _plan(row: Sequence[Action], ends: Sequence[int], bound: int, stage: int, early: bool) -> list[_Transfer]:
    """Return the transfers of Algorithm 1, generalised from 1F1B to any compute order; ``ends``: logical times of ends.

    A cache of ``bound`` units (§3.4): in every slot, that is beside every compute action, evict what is needed
    furthest in the future (Belady) if the next slot would not fit otherwise; load one decision before the backward
    (line 17). A bubble is a decision too: then the load starts when the compute action before the bubble has ended.
    ``early``: one decision earlier still where there is room, such as what the eviction of that slot leaves: then the
    two share the time of a backward and a forward (Appendix B, Equations 10 to 12), and may take 1.5 forwards each.
    Where a backward comes in two halves, its unit has to be there from the first, and leaves with the second.
    """
    backward = {action[1:3]: slot for slot, action in enumerate(row) if action.kind in (BACKWARD, INPUT_GRADIENT)}
    forward = [action.kind == FORWARD for action in row]
    used = [backward[action[1:3]] for action in row]  # a unit is known by the slot of its backward
    resident: list[int] = []  # in order
    evicted: set[int] = set()
    transfers: list[_Transfer] = []

    def arriving(slot: int) -> list[int]:
        """Units that have to come in with ``slot``: its forward's and the next backward's, or its own backward's."""
        if slot < len(row) and forward[slot]:
            return [used[slot], slot + 1] if slot + 1 in evicted else [used[slot]]
        return [slot] if slot in evicted else []

    for slot, action in enumerate(row):
        leaving = action.kind in FINISHING
        incoming = arriving(slot)
        if not forward[slot] and slot + 1 in evicted and len(resident) + len(incoming) < bound:
            incoming += [slot + 1] * (not _bubble_before(slot + 1, row, ends))
        for unit in incoming:
            insort(resident, unit)
            if unit in evicted:
                evicted.discard(unit)
                transfers.append(_Transfer(slot, LOAD, unit))
        if len(resident) > bound:
            raise ScheduleError(
                f"bound={bound}: stage {stage} cannot hold fewer than {len(resident)} micro-batches at {action}; "
                "use a larger bound"
            )
        while len(resident) - leaving + len(arriving(slot + 1)) > bound:
            # Only what was complete before this slot can leave in it.
            staying = (*incoming, used[slot])
            furthest = next((unit for unit in reversed(resident) if unit not in staying), -1)
            if furthest < slot:  # there is none, or its weight gradient alone is missing
                break
            del resident[bisect_left(resident, furthest)]
            evicted.add(furthest)
            transfers.append(_Transfer(slot, EVICT, furthest))
        for unit in arriving(slot + 1) if early else ():
            if unit in evicted and len(resident) < bound:
                insort(resident, unit)
                evicted.discard(unit)
                transfers.append(_Transfer(slot, LOAD, unit))
        if leaving:
            resident.remove(used[slot])
    return transfers


def _bubble_before(slot: int, row: Sequence[Action], ends: Sequence[int]) -> bool:
    """Return whether the stage waits before the compute action of ``slot``."""
    return slot < len(row) and ends[slot] - ends[slot - 1] > KINDS[row[slot].kind].ticks


def _insert(row: Sequence[Action], inserts: Sequence[tuple[int, Action]]) -> tuple[Action, ...]:
    """Return ``row`` with each action put before the compute action of its slot, in the given order."""
    merged: list[Action] = []
    done = 0
    for slot, action in inserts:
        merged += row[done:slot]
        merged.append(action)
        done = max(done, slot)
    return (*merged, *row[done:])


def _receive(
    kinds: Column, ends: Sequence[int], transfers: Sequence[tuple[Action, int]], bound: int
) -> list[tuple[int, Action]]:
    """Put each ACCEPT or RETURN before one of the acceptor's compute actions (by its index).

    ``transfers`` come with the logical time at which the evictor issues its end; ``ends`` are the times at which its
    compute actions, of these ``kinds``, end. The acceptor issues its end at the last boundary between two actions that
    is not later, so that it is ready in time and can never be what the evictor waits for. If an accept had no room
    there before a return is through, it moves on by one boundary: the evictor has until the end of its backward
    (Appendix B), while the acceptor would otherwise stand still.
    """
    room = bound - own_peak(kinds)
    held: list[int] = []  # when the return of each unit that is here will be through, in order
    returning = {action[1:3]: time + KINDS[FORWARD].ticks for action, time in transfers if action.kind != ACCEPT}
    placed = []
    for action, issued in transfers:
        slot = bisect_right(ends, issued)
        if action.kind == ACCEPT:
            del held[: bisect_right(held, _boundary(slot, ends))]
            later = [slot, slot + 1] if slot < len(ends) else [slot]
            slot = next((s for s in later if len(held) - bisect_right(held, _boundary(s, ends)) < room), slot)
            insort(held, returning[action[1:3]])
        placed.append((slot, action))
    return placed


def _boundary(slot: int, ends: Sequence[int]) -> int:
    """Return the logical time just before the compute action ``slot``."""
    return ends[slot - 1] if slot else 0
