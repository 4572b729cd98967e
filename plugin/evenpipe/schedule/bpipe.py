"""The BPipe pass: evict and load between paired stages so that no stage holds more than a bound (BPipe §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from evenpipe.schedule.acceptor import receive
from evenpipe.schedule.actions import Action, Unit
from evenpipe.schedule.clock import TICKS, boundaries
from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.kinds import ACCEPT, BACKWARD, EVICT, FORWARD, LOAD, RETURN, Kind
from evenpipe.schedule.residency import own_peak
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.topology import partner

__all__ = ["balance"]


class _Transfer(NamedTuple):
    """An eviction or load that is issued just before the evictor's compute action ``slot``."""

    slot: int
    kind: Kind
    unit: Unit


def balance(schedule: Schedule, bound: int) -> Schedule:
    """The same compute orders with transfers added, so that no stage holds more than ``bound`` live units.

    Works on any compute orders. Raises :class:`ScheduleError` if an evictor cannot get below the bound; whether every
    acceptor and the middle stage do, :func:`evenpipe.schedule.verify` decides.
    """
    stages = schedule.stages
    ends = boundaries(schedule.actions, schedule.routes)
    rows = list(schedule.actions)
    for evictor in range(stages // 2):
        acceptor = partner(evictor, stages)
        transfers = _plan(rows[evictor], ends[evictor], bound, evictor)
        issued = [ends[evictor][transfer.slot - 1] if transfer.slot else 0 for transfer in transfers]
        rows[evictor] = _insert(
            rows[evictor],
            [(transfer.slot, Action(transfer.kind, *transfer.unit)) for transfer in transfers],
        )
        accepting = [
            (Action(ACCEPT if transfer.kind == EVICT else RETURN, *transfer.unit, evictor), time)
            for transfer, time in zip(transfers, issued, strict=True)
        ]
        rows[acceptor] = _insert(rows[acceptor], receive(rows[acceptor], ends[acceptor], accepting, bound))
    return replace(schedule, bound=bound, actions=tuple(rows))


def _plan(row: Sequence[Action], ends: Sequence[int], bound: int, stage: int) -> list[_Transfer]:
    """Algorithm 1, generalised from 1F1B to any compute order; ``ends`` are the logical times at which actions end.

    A cache of ``bound`` units (§3.4): in every slot, that is beside every compute action, evict what is needed
    furthest in the future (Belady) if the next slot would not fit otherwise; load one decision before the backward
    (line 17). A bubble is a decision too: then the load starts when the compute action before the bubble has ended.
    """
    if own_peak(row) <= bound:
        return []
    needed = {action.unit: slot for slot, action in enumerate(row) if action.kind == BACKWARD}
    resident: set[Unit] = set()
    evicted: set[Unit] = set()
    transfers: list[_Transfer] = []

    def awaited(slot: int) -> list[Unit]:
        """The evicted unit whose backward is the compute action of ``slot``, if it is one."""
        if not evicted or slot >= len(row) or row[slot].kind != BACKWARD:
            return []
        return [row[slot].unit] if row[slot].unit in evicted else []

    def arriving(slot: int) -> list[Unit]:
        """What has to come in with ``slot``: its forward's unit and the next backward's, or its own backward's."""
        if slot < len(row) and row[slot].kind == FORWARD:
            return [row[slot].unit, *awaited(slot + 1)]
        return awaited(slot)

    for slot, action in enumerate(row):
        leaving = int(action.kind == BACKWARD)
        incoming = arriving(slot)
        if leaving and evicted and len(resident) + len(incoming) < bound and not _bubble_before(slot + 1, row, ends):
            incoming += awaited(slot + 1)
        for unit in incoming:
            resident.add(unit)
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
            candidates = resident.difference(incoming, [action.unit])
            if not candidates:
                break
            furthest = max(candidates, key=needed.__getitem__)
            resident.discard(furthest)
            evicted.add(furthest)
            transfers.append(_Transfer(slot, EVICT, furthest))
        if leaving:
            resident.discard(action.unit)
    return transfers


def _bubble_before(slot: int, row: Sequence[Action], ends: Sequence[int]) -> bool:
    """Whether the stage waits before the compute action of ``slot``."""
    return slot < len(row) and ends[slot] - ends[slot - 1] > TICKS[row[slot].kind]


def _insert(row: Sequence[Action], inserts: Sequence[tuple[int, Action]]) -> tuple[Action, ...]:
    """``row`` with each action put before the compute action of its slot, in the given order."""
    merged: list[Action] = []
    pending = list(reversed(inserts))
    for slot, action in enumerate(row):
        while pending and pending[-1][0] <= slot:
            merged.append(pending.pop()[1])
        merged.append(action)
    merged.extend(action for _, action in reversed(pending))
    return tuple(merged)
