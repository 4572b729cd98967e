"""An independent judge of schedules: carries out the rows alone, event by event, by rules of its own.

The rules are those of the notation (``evenpipe.schedule.kinds``, PipeDream-2BW §3.1, BPipe §3), written once more. A
stage may have to wait until what it trades with its partner is through, so both have to be there at the same time.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

from evenpipe.schedule import Action, Schedule

__all__ = ["fault"]

# What happens to a micro-batch of a stage's own, and to a guest.
_OWN, _GUEST = re.compile("F(OI|O?EL)?(B|DW)"), re.compile("AR")
_Message = tuple[Any, ...]


def fault(schedule: Schedule) -> str | None:
    """Why it cannot be carried out; None if it can."""
    return next(_faults(schedule), None)


def _faults(schedule: Schedule) -> Iterator[str]:
    for stage, row in enumerate(schedule.actions):
        yield from _life(schedule, stage, row)
        yield from _versions(schedule, stage, row)
    model = {tuple(place): position for position, place in enumerate(schedule.places.order)}
    yield from _orders(schedule, model)
    yield from _run(schedule, model)


def _life(schedule: Schedule, stage: int, row: tuple[Action, ...]) -> Iterator[str]:
    other = schedule.stages - 1 - stage
    units = {(i, c) for i in range(schedule.micro_batches * schedule.batches) for c in range(schedule.chunks)}
    words: dict[tuple[int, int, int], str] = defaultdict(str)
    for kind, number, chunk, evictor in row:
        if kind == "U":
            if (chunk, evictor) != (0, -1):
                yield "an update of a part"
            continue
        if (number, chunk) not in units:
            yield "out of range"
        if kind in "AR":
            if not (evictor == other < stage):
                yield "accepted from a stranger"
        elif evictor != -1:
            yield "an evictor of what is no guest"
        if kind in "EL" and not stage < other:
            yield "evicts and is no evictor"
        words[number, chunk, evictor] += kind
    for (_, _, evictor), word in words.items():
        if not (_OWN if evictor == -1 else _GUEST).fullmatch(word):
            yield f"a unit goes through {word}"
    if any((*unit, -1) not in words for unit in units):
        yield "a unit is missing"


def _versions(schedule: Schedule, stage: int, row: tuple[Action, ...]) -> Iterator[str]:
    """Of two buffers, U<t> writes W(t + 1) over W(t − 1)."""
    updates = [action.micro_batch for action in row if action.kind == "U"]
    if schedule.weight_versions == 1:
        if updates:
            yield "an update in a batch of its own"
        return
    if updates != list(range(schedule.batches)):
        yield "updates are not there once each, in order"
    buffers = {0}
    left = [schedule.micro_batches * schedule.chunks] * schedule.batches
    flying = 0
    for action in row:
        if action.kind == "U":
            if left[action.micro_batch]:
                yield "an update before its gradients"
            buffers = {action.micro_batch, action.micro_batch + 1}
        elif action.kind in "FBDW":
            batch = action.micro_batch // schedule.micro_batches
            if max(batch - 1, 0) not in buffers:
                yield "a weight version that is not there"
            left[batch] -= action.kind in "BW"
            flying += (action.kind == "F") - (action.kind in "BW")
            if flying > (schedule.stages - stage) * schedule.chunks:
                yield "too many in flight"


def _ends(schedule: Schedule, model: dict[Any, int], stage: int, action: Action) -> Iterator[tuple[Any, _Message, int]]:
    """Link, message and end (0: sends, 1: receives) of what an action moves or computes; local ones have no link."""
    kind, number, chunk, evictor = action
    if kind in "FBD":
        way, here = (1 if kind == "F" else -1), model[stage, chunk]
        for position, end in ((here - way, 1), (here + way, 0)):
            if 0 <= position < len(model):
                there = schedule.places.order[position].stage
                link = (way, there, stage) if end else (way, stage, there)
                yield None if there == stage else link, (way, number, here if end else position), end
    elif kind in "ELAR":
        of = evictor if kind in "AR" else stage
        link = ("out" if kind in "EA" else "back", of)
        yield link, (*link, number, chunk), int(kind in "LA")


def _orders(schedule: Schedule, model: dict[Any, int]) -> Iterator[str]:
    queues: dict[Any, tuple[list[_Message], list[_Message]]] = defaultdict(lambda: ([], []))
    for stage, row in enumerate(schedule.actions):
        for action in row:
            for link, message, end in _ends(schedule, model, stage, action):
                if link is not None:
                    queues[link][end].append(message)
    if any(sent != received for sent, received in queues.values()):
        yield "the ends of a link disagree"


class _Stage:
    """One stage on its way through its row."""

    def __init__(self, schedule: Schedule, model: dict[Any, int], stage: int) -> None:
        self.row, self.bound = schedule.actions[stage], schedule.bound
        self.at = 0
        self.live = self.guests = own = self.own = 0
        for action in self.row:
            own += (action.kind == "F") - (action.kind in "BW")
            self.own = max(own, self.own)
        self.departing: deque[tuple[tuple[int, int], _Message]] = deque()
        self.moving: dict[tuple[int, int, int], _Message] = {}
        self.ends = [list(_ends(schedule, model, stage, action)) for action in self.row]
        self.waits: list[_Message] | None = None

    def arrive(self) -> list[_Message]:
        """What must be complete before the next action."""
        if self.waits is not None:
            return self.waits
        action, ends = self.row[self.at], self.ends[self.at]
        kind, unit = action.kind, (action.micro_batch, action.chunk)
        if kind == "U":
            self.waits = [("batch", action.micro_batch)]
            return self.waits
        waits = []
        if kind in "FLA":
            while self.departing and (
                self.live + 1 > self.bound
                or (kind == "A" and self.guests + 1 > self.bound - self.own)
                or (kind == "L" and unit in [one for one, _ in self.departing])
            ):
                waits.append(self.departing.popleft()[1])
                self.live -= 1
                self.guests -= self.guests > 0
        if kind in "BDR" and (*unit, action.evictor) in self.moving:
            waits.append(self.moving.pop((*unit, action.evictor)))
        if kind in "FBD":
            waits += [message for _, message, end in ends if end]
        self.waits = waits
        return waits

    def act(self, sent: set[_Message]) -> str | None:
        """The action itself; says what is wrong with the memory that it takes."""
        action, ends = self.row[self.at], self.ends[self.at]
        kind, unit = action.kind, (action.micro_batch, action.chunk)
        for _, message, end in ends:
            if not end:
                sent.add(message)
            elif kind in "LA":
                self.moving[(*unit, action.evictor)] = message
            if kind in "ER":
                self.departing.append((unit, message))
        self.live += (kind in "FLA") - (kind in "BW")
        self.guests += kind == "A"
        self.at, self.waits = self.at + 1, None
        if self.live > self.bound or (kind == "A" and self.guests > self.bound - self.own):
            return "the bound is broken"
        return None


def _run(schedule: Schedule, model: dict[Any, int]) -> Iterator[str]:
    """All stages at once; what partners trade, both carry out together."""
    stages = [_Stage(schedule, model, stage) for stage in range(schedule.stages)]
    sent: set[_Message] = set()
    there: set[tuple[_Message, int]] = set()  # ends of trades
    left = [schedule.micro_batches * len(model)] * schedule.batches
    moved = True
    while moved:
        moved = False
        for stage in stages:
            while stage.at < len(stage.row):
                if any(message not in sent for message in stage.arrive()):
                    break
                action = stage.row[stage.at]
                if action.kind in "ELAR":
                    ((_, trade, end),) = stage.ends[stage.at]
                    there.add((trade, end))
                    if (trade, 1 - end) not in there:
                        break
                if (wrong := stage.act(sent)) is not None:
                    yield wrong
                if action.kind in "BW":
                    batch = action.micro_batch // schedule.micro_batches
                    left[batch] -= 1
                    if not left[batch]:
                        sent.add(("batch", batch))
                moved = True
    if any(stage.at < len(stage.row) for stage in stages):
        yield "the stages wait for one another for ever"
