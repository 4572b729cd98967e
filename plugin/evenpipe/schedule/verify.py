"""The proof that a schedule is right, made before anything runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from evenpipe.schedule.actions import ACCEPT, BACKWARD, DEPARTING, EVICT, FORWARD, LOAD, RETURN, UPDATE, Action, Unit
from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.grid import format_grid
from evenpipe.schedule.lower import Program, lower
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.topology import Link, Message, partner
from evenpipe.schedule.versions import version_fault

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
    goes beyond the bound, (5) no stage waits for ever, and (6) without flushes, every micro-batch is forwarded and
    backwarded with the weight version that 2BW's rule gives it, with at most two versions on a stage.
    """
    if min(schedule.stages, schedule.micro_batches, schedule.batches) < 1:
        raise ScheduleError(
            f"schedule {schedule.name}: {schedule.stages} stages and {schedule.micro_batches} micro-batches "
            "are no pipeline"
        )
    if len(schedule.actions) != schedule.stages:
        raise ScheduleError(
            f"schedule {schedule.name}: {len(schedule.actions)} rows of actions, {schedule.stages} stages"
        )
    try:
        for stage in range(schedule.stages):
            _check_stage(schedule, stage)
            if schedule.name == "2bw" and (found := version_fault(schedule, stage)) is not None:
                raise _Fault(found[1], stage, found[0])
        program = lower(schedule)
        _check_links(program)
        for stage, held in enumerate(schedule.residencies):
            if held.broken is not None:
                action = schedule.actions[stage][held.broken]
                raise _Fault(f"{action} makes more than {schedule.bound} live micro-batches", stage, held.broken)
        _check_progress(program)
    except _Fault as fault:
        stage, step = fault.mark
        grid = format_grid(schedule, fault.mark)
        raise ScheduleError(f"schedule {schedule.name}, stage {stage}, step {step}: {fault}\n{grid}") from None
    return schedule


def _check_stage(schedule: Schedule, stage: int) -> None:
    """Compute is complete and in order; what a backward needs is resident; transfers belong here."""
    forwarded: set[tuple[int, int]] = set()
    backwarded: set[tuple[int, int]] = set()
    evicted: set[tuple[int, int]] = set()
    loaded: set[tuple[int, int]] = set()
    accepted: set[tuple[int, int]] = set()
    returned: set[tuple[int, int]] = set()
    micro_batches = schedule.micro_batches * schedule.batches
    chunks, other = schedule.chunks, partner(stage, schedule.stages)
    row = schedule.actions[stage]
    for step, action in enumerate(row):
        kind, unit = action.kind, action[1:3]  # a plain tuple, equal to the unit: there are millions
        fault = None
        if kind == UPDATE:
            if schedule.name != "2bw":
                raise _Fault(f"{action} is an update, and only 2bw has them", stage, step)
            continue
        if not (unit[0] < micro_batches and unit[1] < chunks):
            fault = f"is not one of {micro_batches} micro-batches × {chunks} chunks"
        elif kind == FORWARD:
            fault = "is a second forward" if unit in forwarded else None
            forwarded.add(unit)
        elif kind == BACKWARD:
            if unit not in forwarded:
                fault = "comes before its forward"
            elif unit in backwarded:
                fault = "is a second backward"
            elif unit in evicted and unit not in loaded:
                fault = "is a backward whose micro-batch is not resident"
            backwarded.add(unit)
        elif kind == EVICT:
            if stage >= other:
                fault = "evicts on a stage that is no evictor"
            elif unit not in forwarded or unit in backwarded or unit in evicted:
                fault = "evicts what is not resident, or for a second time"
            evicted.add(unit)
        elif kind == LOAD:
            fault = None if unit in evicted and unit not in loaded else "loads what is not away"
            loaded.add(unit)
        elif action.evictor != other or stage <= other:
            fault = f"names an evictor that is not the partner of stage {stage}"
        elif kind == ACCEPT:
            fault = "is a second accept" if unit in accepted else None
            accepted.add(unit)
        else:
            fault = None if unit in accepted and unit not in returned else "returns what is not held"
            returned.add(unit)
        if fault is not None:
            raise _Fault(f"{action} {fault}", stage, step)
    end = len(row) - 1
    if len(backwarded) < micro_batches * chunks:
        lost = next(u for c in range(chunks) for i in range(micro_batches) if (u := Unit(i, c)) not in backwarded)
        raise _Fault(f"{Action(BACKWARD if lost in forwarded else FORWARD, *lost)} is missing", stage, end)
    if accepted != returned:
        raise _Fault(f"{Action(RETURN, *min(accepted - returned), other)} is missing", stage, end)


def _check_links(program: Program) -> None:
    """Both ends of every first-in-first-out link name the same messages in the same order."""
    sent: dict[Link, list[Message]] = defaultdict(list)
    received: dict[Link, list[Message]] = defaultdict(list)
    for steps in program.steps:
        for step in steps:
            for message in step.post:
                received[message.link].append(message)
            if step.send is not None:
                sent[step.send.link].append(step.send)
            if step.transfer is not None:
                ends = sent if step.action.kind in DEPARTING else received
                ends[step.transfer.link].append(step.transfer)
    for link in sorted(sent.keys() | received.keys()):
        theirs, ours = sent[link], received[link]
        if theirs == ours:
            continue
        index, (out, into) = next((i, pair) for i, pair in enumerate(zip_longest(theirs, ours)) if pair[0] != pair[1])
        reason = (
            f"the ends of link {link} disagree on message {index}: "
            f"stage {link.source} sends {_unit_name(out)}, stage {link.target} receives {_unit_name(into)}"
        )
        steps = program.steps[link.target]
        use = (at for at, step in enumerate(steps) if into is not None and into in (step.transfer, *step.complete))
        raise _Fault(reason, link.target, next(use, len(steps) - 1))


def _unit_name(message: Message | None) -> str:
    if message is None:
        return "nothing"
    return f"micro-batch {message.micro_batch}" + (f" of chunk {message.chunk}" if message.chunk else "")


#: What a stage waits for: a message, or a batch (by its number) that all stages have ended, as an update does.
_Awaited = Message | int


def _check_progress(program: Program) -> None:
    """Walk the lowered program of all stages at once; a message is complete when it is both sent and posted.

    All stages have ended a batch when stage 0 has: its last backward follows all others.
    """
    sent: set[_Awaited] = set()
    posted: set[_Awaited] = set()
    position = [0] * len(program.steps)
    blocked: dict[_Awaited, list[int]] = defaultdict(list)
    runnable = list(range(len(program.steps)))
    while runnable:
        stage = runnable.pop()
        steps = program.steps[stage]
        while position[stage] < len(steps):
            step = steps[position[stage]]
            kind, number = step.action.kind, step.action.micro_batch
            _reach(step.post, posted, blocked, runnable)
            awaited = (number,) if kind == UPDATE else step.complete
            unmet = [one for one in awaited if one not in sent or one not in posted]
            if unmet:
                blocked[unmet[0]].append(stage)
                break
            if step.transfer is not None:
                _reach((step.transfer,), sent if kind in DEPARTING else posted, blocked, runnable)
            if step.send is not None:
                _reach((step.send,), sent, blocked, runnable)
            if stage == 0 and kind == BACKWARD and (number + 1) % program.schedule.micro_batches == 0:
                ended = (number // program.schedule.micro_batches,)
                _reach(ended, posted, blocked, runnable)
                _reach(ended, sent, blocked, runnable)
            position[stage] += 1
    for stage, steps in enumerate(program.steps):
        if position[stage] < len(steps):
            action = steps[position[stage]].action
            reason = f"{action} waits for ever: the stages wait for one another in a circle"
            raise _Fault(reason, stage, position[stage])


def _reach(
    messages: Sequence[_Awaited], reached: set[_Awaited], blocked: dict[_Awaited, list[int]], runnable: list[int]
) -> None:
    """Note that one end of ``messages`` has been reached, and wake the stages that wait for them."""
    for message in messages:
        reached.add(message)
        if message in blocked:
            runnable.extend(blocked.pop(message))
