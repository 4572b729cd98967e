"""An independent judge of schedules: carries out the rows alone, event by event, by rules of its own.

The rules are those of the notation (``evenpipe.schedule.actions``, PipeDream-2BW §3.1, BPipe §3), written once more. A
stage may have to wait until what it trades with its partner is through, so both have to be there at the same time.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import accumulate
from operator import itemgetter
from typing import Any

from evenpipe.schedule import Action, Schedule
from tests.schedule.deadlock import Call, stuck

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
    """Of two buffers, U<t> writes W(t + 1) over W(t − 1); of one, over W(t)."""
    updates = [action.micro_batch for action in row if action.kind == "U"]
    if schedule.weight_versions == 1 and not updates:
        return
    if updates != list(range(schedule.batches)):
        yield "updates are not there once each, in order"
    buffers = {0}
    left = [schedule.micro_batches * schedule.chunks] * schedule.batches
    flying = 0
    begun: dict[tuple[int, int], int] = {}
    for action in row:
        if action.kind == "U":
            if left[action.micro_batch]:
                yield "an update before its gradients"
            buffers = {action.micro_batch, action.micro_batch + 1}
        elif action.kind in "FBDW":
            batch = action.micro_batch // schedule.micro_batches
            if schedule.weight_versions == 2 and max(batch - 1, 0) not in buffers:
                yield "a weight version that is not there"
            if action.kind == "F":
                begun[action.micro_batch, action.chunk] = max(buffers)
            elif schedule.weight_versions == 1:
                drift = max(buffers) - begun[action.micro_batch, action.chunk]
                if drift > -(-(schedule.stages - 1 - stage) // schedule.micro_batches):
                    yield "a forward on weights that are too old for its backward"
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


def _calls(schedule: Schedule, model: dict[Any, int], stage: int) -> tuple[list[Call], bool]:
    """What a stage waits for and gives, in order; and whether it keeps within the bound."""
    row, bound = schedule.actions[stage], schedule.bound
    own = max(accumulate((action.kind == "F") - (action.kind in "BW") for action in row), default=0)
    live, guests, within = 0, 0, True
    departing: deque[tuple[tuple[int, int], _Message]] = deque()
    moving: dict[tuple[int, int, int], _Message] = {}
    calls: list[Call] = []
    for kind, number, chunk, evictor in row:
        batch, unit = number // schedule.micro_batches, (number, chunk)
        if kind == "U":
            if schedule.weight_versions == 2:  # one alone is stepped with the stage's own gradients
                calls.append(Call("take", ("batch", number), schedule.micro_batches * len(model)))
            continue
        if kind in "FLA":
            while departing and (
                live + 1 > bound
                or (kind == "A" and guests + 1 > bound - own)
                or (kind == "L" and unit in [one for one, _ in departing])
            ):
                calls.append(Call("take", departing.popleft()[1], 2))
                live -= 1
                guests -= guests > 0
        if kind in "BDR" and (*unit, evictor) in moving:
            calls.append(Call("take", moving.pop((*unit, evictor)), 2))
        for _, message, end in sorted(
            _ends(schedule, model, stage, Action(kind, *unit, evictor)), key=itemgetter(2), reverse=True
        ):
            if kind not in "ELAR":
                calls.append(Call("give" if end == 0 else "take", message))
                continue
            calls.append(Call("meet", message, 2))
            if kind in "LA":
                moving[(*unit, evictor)] = message
            else:
                departing.append((unit, message))
        calls += [Call("give", ("batch", batch))] * (kind in "BW")
        live += (kind in "FLA") - (kind in "BW")
        guests += kind == "A"
        within &= live <= bound and (kind != "A" or guests <= bound - own)
    return calls, within


def _run(schedule: Schedule, model: dict[Any, int]) -> Iterator[str]:
    """All stages at once; what partners trade, both carry out together."""
    calls, within = zip(*(_calls(schedule, model, stage) for stage in range(schedule.stages)), strict=True)
    if not all(within):
        yield "the bound is broken"
    if stuck(calls):
        yield "the stages wait for one another for ever"
