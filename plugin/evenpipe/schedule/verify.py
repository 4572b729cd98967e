"""The proof that a program is right, made before anything runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from evenpipe.schedule.actions import Action
from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.grid import format_grid
from evenpipe.schedule.kinds import (
    DONE,
    FINISHING,
    KINDS,
    OWN_ENDS,
    RECEIVING,
    SENDING,
    STATES,
    UNKNOWN,
    Kind,
    State,
)
from evenpipe.schedule.lower import Program, lower
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.topology import Link, Message, partner
from evenpipe.schedule.versions import version_fault

__all__ = ["verify"]

#: By kind: the states that it takes a unit in, and the one that it leaves it in.
_TAKES = {letter: row.takes for letter, row in KINDS.items()}
_LEAVES = {letter: row.leaves for letter, row in KINDS.items()}
_OF_BATCH = frozenset(letter for letter, row in KINDS.items() if row.of_batch)
_GUEST = frozenset(letter for letter, row in KINDS.items() if row.guest)
#: The evictor's side of what pairs trade.
_EVICTING = frozenset(letter for letter, row in KINDS.items() if row.link and letter not in _GUEST | OWN_ENDS)


class _Fault(Exception):
    """What is wrong, and the step of one stage to point at."""

    def __init__(self, reason: str, stage: int, step: int) -> None:
        super().__init__(reason)
        self.mark = (stage, step)


def verify(schedule: Schedule, pairs: bool = False) -> Program:
    """``schedule``, lowered, if it is right; otherwise :class:`ScheduleError` with the offending step marked in a grid.

    Proves that (1) every stage forwards and then backwards every unit exactly once, (2) what was evicted or swapped
    out is back before its backward, each transfer at its right partner, (3) both ends of every link agree on the order,
    (4) no stage goes beyond the bound, (5) no stage waits for ever, and (6) without flushes, every micro-batch is
    forwarded and backwarded with the weight version that 2BW's rule gives it, with at most two versions on a stage.
    """
    _check_sizes(schedule)
    try:
        for stage in range(schedule.stages):
            _check_stage(schedule, stage)
            if schedule.weight_versions > 1 and (found := version_fault(schedule, stage)) is not None:
                raise _Fault(found[1], stage, found[0])
        program = lower(schedule, pairs)
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
    return program


def _check_sizes(schedule: Schedule) -> None:
    named = f"schedule {schedule.name}: "
    if min(schedule.stages, schedule.micro_batches, schedule.batches, schedule.chunks, schedule.group_size) < 1:
        raise ScheduleError(
            f"{named}{schedule.stages} stages and {schedule.micro_batches} micro-batches are no pipeline"
        )
    if len(schedule.actions) != schedule.stages:
        raise ScheduleError(f"{named}{len(schedule.actions)} rows of actions, {schedule.stages} stages")
    if (schedule.places.stages, schedule.places.chunks) != (schedule.stages, schedule.chunks):
        raise ScheduleError(
            f"{named}places for {schedule.places.stages} stages × {schedule.places.chunks} chunks, "
            f"{schedule.stages} stages × {schedule.chunks} chunks"
        )
    if schedule.weight_versions not in (1, 2):
        raise ScheduleError(f"{named}weight_versions={schedule.weight_versions}: there is a rule for 1 and for 2")


def _check_stage(schedule: Schedule, stage: int) -> None:
    """Every unit goes from state to state as the table of kinds has it, to the end; transfers are of this pair."""
    states: dict[tuple[int, int, int], State] = {}
    micro_batches = schedule.micro_batches * schedule.batches
    chunks, other = schedule.chunks, partner(stage, schedule.stages)
    row = schedule.actions[stage]
    for step, action in enumerate(row):
        kind, micro_batch, chunk, evictor = action
        if kind in _OF_BATCH:
            if schedule.weight_versions < 2:
                raise _Fault(f"{action} is an update, and only streams of batches have them", stage, step)
            if (chunk, evictor) != (0, -1):
                raise _Fault(f"{action} names a part of a batch, and an update is of all of it", stage, step)
            continue
        if not (0 <= micro_batch < micro_batches and 0 <= chunk < chunks):
            raise _Fault(f"{action} is not one of {micro_batches} micro-batches × {chunks} chunks", stage, step)
        if kind in _GUEST:
            if evictor != other or stage <= other:
                raise _Fault(f"{action} names an evictor that is not the partner of stage {stage}", stage, step)
        elif evictor != -1:
            raise _Fault(f"{action} names an evictor and is not of a guest", stage, step)
        elif kind in _EVICTING and stage >= other:
            raise _Fault(f"{action} evicts on a stage that is no evictor", stage, step)
        unit = micro_batch, chunk, evictor
        state = states.get(unit, UNKNOWN)
        if state not in _TAKES[kind]:
            raise _Fault(f"{action} finds its micro-batch {_said(state, kind)}", stage, step)
        states[unit] = _LEAVES[kind]
    own = ((i, c, -1) for c in range(chunks) for i in range(micro_batches))
    for unit in (*own, *states):
        if states.get(unit, UNKNOWN) != DONE:
            raise _Fault(f"{_next_action(unit, states.get(unit, UNKNOWN))} is missing", stage, len(row) - 1)


def _said(state: State, kind: Kind) -> str:
    if state == UNKNOWN and kind in _GUEST:
        return "not accepted yet"
    return STATES[state]


def _next_action(unit: tuple[int, int, int], state: State) -> Action:
    """The first in the table that would take a unit on from its state."""
    kind = next(row.letter for row in KINDS.values() if state in row.takes and row.guest == (unit[2] >= 0))
    return Action(kind, *unit)


def _check_links(program: Program) -> None:
    """Both ends of every first-in-first-out link name the same messages in the same order."""
    sent: dict[Link, list[Message]] = defaultdict(list)
    received: dict[Link, list[Message]] = defaultdict(list)
    for steps in program.steps:
        for step in steps:
            for message in step.post:
                received[message.link].append(message)
            if step.send is not None and not step.send.is_local:
                sent[step.send.link].append(step.send)
            if step.transfer is not None and not step.transfer.is_local:
                ends = sent if step.action.kind in SENDING else received
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


#: What a stage waits for: a message, or a batch (by its number) whose gradients are complete on all stages.
_Awaited = Message | int


def _check_progress(program: Program) -> None:
    """Walk the lowered program of all stages at once; a message is complete when it is both sent and posted."""
    schedule = program.schedule
    sent: set[_Awaited] = set()
    posted: set[_Awaited] = set()
    unfinished = [schedule.micro_batches * len(schedule.places.order)] * schedule.batches
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
            awaited: tuple[_Awaited | None, ...] = (number,) if kind in _OF_BATCH else (*step.complete, step.takes)
            unmet = [one for one in awaited if one is not None and (one not in sent or one not in posted)]
            if unmet:
                blocked[unmet[0]].append(stage)
                break
            if step.transfer is not None:
                _reach((step.transfer,) * (kind in SENDING), sent, blocked, runnable)
                _reach((step.transfer,) * (kind in RECEIVING), posted, blocked, runnable)
            if step.send is not None:
                _reach((step.send,), sent, blocked, runnable)
                _reach((step.send,) * step.send.is_local, posted, blocked, runnable)
            if kind in FINISHING:
                batch = number // schedule.micro_batches
                unfinished[batch] -= 1
                ended = (batch,) * (unfinished[batch] == 0)
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
