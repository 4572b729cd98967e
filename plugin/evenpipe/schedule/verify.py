"""The proof that a schedule is right, made before anything runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from evenpipe.schedule.actions import (
    ACCEPT,
    ARRIVING,
    BACKWARD,
    COMPUTE,
    EVICT,
    FORWARD,
    LOAD,
    RETURN,
    Action,
    Unit,
)
from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.grid import format_grid
from evenpipe.schedule.lower import lower, transfer
from evenpipe.schedule.residency import residency
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.topology import Link, Message, incoming, outgoing, partner

__all__ = ["verify"]


class _Fault(Exception):
    """What is wrong, and the step of one stage to point at."""

    def __init__(self, reason: str, stage: int, step: int) -> None:
        super().__init__(reason)
        self.mark = (stage, step)


def verify(schedule: Schedule) -> Schedule:
    """``schedule`` itself, if it is right; otherwise :class:`ScheduleError` with the offending step marked in a grid.

    Proves that (1) every stage forwards and then backwards every unit exactly once, (2) evicted units come back before
    their backward, each transfer at its right partner, (3) both ends of every link agree on the order, (4) no stage
    goes beyond the bound, and (5) no stage waits for ever.
    """
    try:
        for stage in range(schedule.stages):
            _check_stage(schedule, stage)
        _check_links(schedule)
        for stage, row in enumerate(schedule.actions):
            broken = residency(row, schedule.bound).broken
            if broken is not None:
                raise _Fault(f"{row[broken]} makes more than {schedule.bound} live micro-batches", stage, broken)
        _check_progress(schedule)
    except _Fault as fault:
        stage, step = fault.mark
        grid = format_grid(schedule, fault.mark)
        raise ScheduleError(f"schedule {schedule.name}, stage {stage}, step {step}: {fault}\n{grid}") from None
    return schedule


def _check_stage(schedule: Schedule, stage: int) -> None:
    """Compute is complete and in order; what a backward needs is resident; transfers belong here."""
    forwarded: set[Unit] = set()
    backwarded: set[Unit] = set()
    away: set[Unit] = set()
    back: set[Unit] = set()
    accepted: set[Unit] = set()
    returned: set[Unit] = set()
    other = partner(stage, schedule.stages)
    row = schedule.actions[stage]
    for step, action in enumerate(row):
        kind, unit = action.kind, action.unit

        def require(condition: bool, reason: str, step: int = step, action: Action = action) -> None:
            if not condition:
                raise _Fault(f"{action} {reason}", stage, step)

        require(
            0 <= unit.micro_batch < schedule.micro_batches and 0 <= unit.chunk < schedule.chunks,
            f"is not one of {schedule.micro_batches} micro-batches × {schedule.chunks} chunks",
        )
        if kind == FORWARD:
            require(unit not in forwarded, "is a second forward")
            forwarded.add(unit)
        elif kind == BACKWARD:
            require(unit in forwarded, "comes before its forward")
            require(unit not in backwarded, "is a second backward")
            require(unit not in away, "is a backward whose micro-batch is not resident")
            backwarded.add(unit)
        elif kind == EVICT:
            require(stage < other, "evicts on a stage that is no evictor")
            require(unit in forwarded and unit not in backwarded, "evicts what is not resident")
            require(unit not in away and unit not in back, "is a second eviction")
            away.add(unit)
        elif kind == LOAD:
            require(unit in away, "loads what was not evicted")
            away.discard(unit)
            back.add(unit)
        else:
            require(action.evictor == other and other < stage, f"names an evictor that is not the partner of {stage}")
            if kind == ACCEPT:
                require(unit not in accepted, "is a second accept")
                accepted.add(unit)
            else:
                require(unit in accepted and unit not in returned, "returns what is not held")
                returned.add(unit)
    end = len(row) - 1
    for unit in (Unit(i, c) for c in range(schedule.chunks) for i in range(schedule.micro_batches)):
        if unit not in backwarded:
            missing = Action(FORWARD if unit not in forwarded else BACKWARD, *unit)
            raise _Fault(f"{missing} is missing", stage, end)
    if accepted != returned:
        raise _Fault(f"{Action(RETURN, *min(accepted - returned), other)} is missing", stage, end)


def _check_links(schedule: Schedule) -> None:
    """Both ends of every first-in-first-out link name the same messages in the same order."""
    sent: dict[Link, list[Message]] = defaultdict(list)
    received: dict[Link, list[tuple[Message, int]]] = defaultdict(list)
    for stage, row in enumerate(schedule.actions):
        for step, action in enumerate(row):
            for message, outward in _ends(action, stage, schedule):
                if outward:
                    sent[message.link].append(message)
                else:
                    received[message.link].append((message, step))
    for link in sent.keys() | received.keys():
        theirs, ours = sent[link], received[link]
        for index, (message, step) in enumerate(ours):
            if index >= len(theirs) or theirs[index] != message:
                found = _unit_name(theirs[index]) if index < len(theirs) else "nothing"
                raise _Fault(
                    f"the ends of link {link} disagree: stage {link.target} receives {_unit_name(message)}, "
                    f"stage {link.source} sends {found}",
                    link.target,
                    step,
                )
        if len(theirs) > len(ours):
            lost = _unit_name(theirs[len(ours)])
            raise _Fault(
                f"the ends of link {link} disagree: stage {link.source} sends {lost}, "
                f"stage {link.target} never receives it",
                link.target,
                len(schedule.actions[link.target]) - 1,
            )


def _ends(action: Action, stage: int, schedule: Schedule) -> Iterator[tuple[Message, bool]]:
    """The messages that ``action`` receives (False) and sends (True)."""
    if action.kind not in COMPUTE:
        yield transfer(action, stage, schedule.stages), action.kind not in ARRIVING
        return
    for message, outward in (
        (incoming(action, stage, schedule.stages, schedule.chunks), False),
        (outgoing(action, stage, schedule.stages, schedule.chunks), True),
    ):
        if message is not None:
            yield message, outward


def _unit_name(message: Message) -> str:
    return f"micro-batch {message.micro_batch}" + (f" of chunk {message.chunk}" if message.chunk else "")


def _check_progress(schedule: Schedule) -> None:
    """Walk the lowered program of all stages at once; a message is complete when it is both sent and posted."""
    program = lower(schedule)
    sent: set[Message] = set()
    posted: set[Message] = set()
    position = [0] * schedule.stages
    blocked: dict[Message, list[int]] = defaultdict(list)
    runnable = list(range(schedule.stages))
    while runnable:
        stage = runnable.pop()
        steps = program.steps[stage]
        while position[stage] < len(steps):
            step = steps[position[stage]]
            for message in step.post:
                posted.add(message)
                runnable.extend(blocked.pop(message, ()))
            unmet = next((m for m in step.complete if m not in sent or m not in posted), None)
            if unmet is not None:
                blocked[unmet].append(stage)
                break
            if step.send is not None:
                sent.add(step.send)
                runnable.extend(blocked.pop(step.send, ()))
            position[stage] += 1
    for stage, steps in enumerate(program.steps):
        if position[stage] < len(steps):
            action = steps[position[stage]].action
            reason = f"{action} waits for ever: the stages wait for one another in a circle"
            raise _Fault(reason, stage, position[stage])
