"""The acceptor's half of the BPipe pass: where between its own compute actions it takes in and gives back."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

from evenpipe.schedule.actions import Action
from evenpipe.schedule.clock import TICKS
from evenpipe.schedule.kinds import ACCEPT, FORWARD
from evenpipe.schedule.table import Column, own_peak

__all__ = ["receive"]


def receive(
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
    returning = {action[1:3]: time + TICKS[FORWARD] for action, time in transfers if action.kind != ACCEPT}
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
    """The logical time just before the compute action ``slot``."""
    return ends[slot - 1] if slot else 0
