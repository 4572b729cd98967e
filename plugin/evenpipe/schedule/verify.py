"""The proof that a program is right, made before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np

from evenpipe.schedule.actions import (
    ACCEPT,
    COMPUTE,
    DONE,
    FINISHING,
    FORWARD,
    INPUT_GRADIENT,
    KINDS,
    STATES,
    UNKNOWN,
    UPDATE,
    WEIGHT_GRADIENT,
    Action,
    ActionKind,
    Kind,
    ScheduleError,
    State,
    Unit,
)
from evenpipe.schedule.lower import Program, check_order, lower
from evenpipe.schedule.order import Clock, Queues
from evenpipe.schedule.passes import batch_of, required_version
from evenpipe.schedule.schedule import Fault, Schedule, marked
from evenpipe.schedule.table import Column, by_kind, following, own_peak
from evenpipe.schedule.topology import partner
from evenpipe.schedule.wiring import Wiring

__all__ = ["most_drift", "reordered", "verify", "verify_actions"]

_STATES = tuple(STATES)


def _takes(state: State, row: ActionKind) -> bool:
    return state in row.takes


#: By kind: whether it takes a unit in each of the states, and the state that it leaves it in.
_TAKES = np.stack([by_kind(partial(_takes, state)) for state in STATES], axis=1) > 0
_LEAVES = by_kind(lambda row: _STATES.index(row.leaves))


def verify(schedule: Schedule, pairs: bool = False, queues: Queues = "many", fused: bool = False) -> Program:
    """``schedule``, lowered, if it is right; otherwise :class:`ScheduleError` with the offending step marked in a grid.

    Proves that (1) every stage forwards and then backwards every unit exactly once, (2) what was evicted or swapped
    out is back before its backward, each transfer at its right partner, (3) both ends of every link agree on the order,
    (4) no stage goes beyond the bound, (5) no stage waits for ever, even if each of its calls waits until it is through
    (:mod:`evenpipe.schedule.lower`), and (6) without flushes, every micro-batch is forwarded and backwarded with
    the weight version that 2BW's rule gives it, with at most two versions on a stage.

    Of (5), that there is one order of all actions, messages, gatherings and updates is proven here; that a stage's
    steps keep to it, when they are made: :attr:`Program.steps` raises the same error.

    With updates and one weight version, (6) is PACI's rule: a stage updates after its own last backward of a batch, and
    between a micro-batch's forward and backward lie no more updates than :func:`most_drift` allows.
    """
    verify_actions(schedule)
    program = lower(schedule, pairs, queues, fused)
    with marked(schedule):
        _check_links(program.wiring)
        for stage, held in enumerate(schedule.residencies):
            if held.broken is not None:
                action = schedule.actions[stage][held.broken]
                bound = schedule.bound_of(stage)
                raise Fault(f"{action} makes more than {bound} live micro-batches", stage, held.broken)
        check_order(program.order)
    return program


def reordered(program: Program, clock: Clock | None, queues: Queues | None = None) -> Program:
    """Return the verified ``program`` in the order of a clock, of which (5) is proven anew; None: of assumed times.

    ``queues``: the order goes by these instead, which is as safe, and may be faster.
    """
    other = replace(program, clock=clock, queues=queues or program.queues)
    with marked(program.schedule):
        check_order(other.order)
    return other


def verify_actions(schedule: Schedule) -> None:
    """Prove (1) and (2) of :func:`verify`, of each stage alone: of compute that is still to be balanced."""
    _check_sizes(schedule)
    with marked(schedule):
        _check_actions(schedule)


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
    if len(schedule.bounds) not in (0, schedule.stages):
        raise ScheduleError(f"{named}{len(schedule.bounds)} bounds, {schedule.stages} stages")
    if schedule.weight_versions not in (1, 2):
        raise ScheduleError(f"{named}weight_versions={schedule.weight_versions}: there is a rule for 1 and for 2")


def _check_actions(schedule: Schedule) -> None:
    """Every unit goes from state to state as the table of kinds has it, to the end; transfers are of a stage's pair."""
    table, chunks = schedule.table, schedule.chunks
    kind, stage, evictor = table.kind, table.stage, table.evictor
    micro_batches = schedule.micro_batches * schedule.batches
    of_batch, guest = table.of_batch, table.which(lambda row: row.guest)
    evicting = table.which(lambda row: row.sends != row.receives and not row.guest)
    other = np.array([partner(one, schedule.stages) for one in range(schedule.stages)])[stage]
    within = (
        (table.micro_batch >= 0) & (table.micro_batch < micro_batches) & (table.chunk >= 0) & (table.chunk < chunks)
    )
    state = np.maximum(0, following(_LEAVES[kind], table.previous))
    faults = (
        (of_batch & ((table.chunk != 0) | (evictor != -1)), "names a part of a batch, and an update is of all of it"),
        (~of_batch & ~within, f"is not one of {micro_batches} micro-batches × {chunks} chunks"),
        (guest & ((evictor != other) | (stage <= other)), "names an evictor that is not the partner of stage {stage}"),
        (~of_batch & ~guest & (evictor != -1), "names an evictor and is not of a guest"),
        (evicting & (stage >= other), "evicts on a stage that is no evictor"),
        (~of_batch & ~_TAKES[kind, state], "finds its micro-batch {state}"),
    )
    first = min(((int(wrong.argmax()), n) for n, (wrong, _) in enumerate(faults) if wrong.any()), default=None)
    done = _LEAVES[kind] == _STATES.index(DONE)
    missing = _count(schedule, done & ~guest) != micro_batches * chunks
    missing |= _count(schedule, done & guest) != _count(schedule, kind == ord(ACCEPT))
    for number, row in enumerate(schedule.actions):
        if first is not None and stage[first[0]] == number:
            step = first[0] - table.of(number).start
            said = _said(_STATES[state[first[0]]], row[step].kind)
            raise Fault(f"{row[step]} {faults[first[1]][1].format(stage=number, state=said)}", number, step)
        if missing[number]:
            raise Fault(f"{_missing(schedule, row)} is missing", number, len(row) - 1)
        fault = None
        if schedule.weight_versions > 1:
            fault = _version_fault(schedule, number)
        elif of_batch.any():
            fault = _drift_fault(schedule, number)
        if fault is not None:
            raise Fault(fault[1], number, fault[0])


def _count(schedule: Schedule, actions: Column) -> Column:
    """Return how many of these ``actions`` each stage has."""
    return np.bincount(schedule.table.stage[actions], minlength=schedule.stages)


def _said(state: State, kind: Kind) -> str:
    if state == UNKNOWN and KINDS[kind].guest:
        return "not accepted yet"
    if state in KINDS[INPUT_GRADIENT].takes and kind == WEIGHT_GRADIENT:
        return "without its input gradient yet"
    return STATES[state]


def _missing(schedule: Schedule, row: Sequence[Action]) -> Action:
    """The first action, in the order of the table of kinds, that would take a unit on that is not done at the end."""
    states: dict[tuple[int, ...], State] = {
        action[1:]: KINDS[action.kind].leaves for action in row if not KINDS[action.kind].of_batch
    }
    own = ((i, c, -1) for c in range(schedule.chunks) for i in range(schedule.micro_batches * schedule.batches))
    unit = next(unit for unit in chain(own, states) if states.get(unit, UNKNOWN) != DONE)
    state, guest = states.get(unit, UNKNOWN), unit[2] >= 0
    able = (row for row in KINDS.values() if state in row.takes and row.guest == guest)
    return Action(min(able, key=lambda row: row.takes.index(state)).letter, *unit)


def _check_links(wiring: Wiring) -> None:
    """Both ends of every first-in-first-out link name the same messages in the same order."""
    wrong = wiring.disagreement
    if wrong is None:
        return
    sent, taken = (
        "nothing" if unit is None else f"micro-batch {unit.micro_batch}" + f" of chunk {unit.chunk}" * (unit.chunk > 0)
        for unit in (wrong.sent, wrong.taken)
    )
    reason = (
        f"the ends of link {wrong.link} disagree on message {wrong.number}: "
        f"stage {wrong.link.source} sends {sent}, stage {wrong.link.target} receives {taken}"
    )
    rows = wiring.schedule.table.of(wrong.link.target)
    raise Fault(reason, wrong.link.target, (wrong.taker if wrong.taker >= 0 else rows.stop - 1) - rows.start)


def most_drift(stages: int, stage: int, micro_batches: int) -> int:
    """Return PACI's bound: the most updates of ``stage`` between a micro-batch's forward and its backward.

    1F1B has at most p − s micro-batches in flight on stage s, so that p − s − 1 backwards lie between, of which every
    a-th ends in an update: ⌈(p − s − 1)/a⌉. Derived here; on stage 0 it is the Δ_max ≤ ⌈(N − 1)/a⌉ that summaries of
    the paper (arXiv 2606.07881) quote, whose own text was not at hand.
    """
    return -(-(stages - stage - 1) // micro_batches)


def _drift_fault(schedule: Schedule, stage: int) -> tuple[int, str] | None:
    """The first step of ``stage`` that breaks PACI's rule, and how; None without a fault."""
    allowed = most_drift(schedule.stages, stage, schedule.micro_batches)
    updated, forwarded_at = 0, dict[Unit, int]()
    unfinished = [schedule.micro_batches * schedule.chunks] * schedule.batches
    row = schedule.actions[stage]
    for step, action in enumerate(row):
        if action.kind == UPDATE:
            if (fault := _update_fault(action, updated, unfinished)) is not None:
                return step, fault
            updated += 1
        elif action.kind == FORWARD:
            forwarded_at[action.unit] = updated
        elif action.kind in COMPUTE:
            batch = batch_of(action.micro_batch, schedule.micro_batches)
            if batch > updated:
                return step, f"{action} comes before U{updated}, whose gradients its own would be added to"
            if (drift := updated - forwarded_at[action.unit]) > allowed:
                return step, f"{action} comes {drift} updates after its forward; paci allows {allowed} on this stage"
            unfinished[batch] -= action.kind in FINISHING
    return None if updated == schedule.batches else (len(row) - 1, f"U{updated} is missing")


def _update_fault(action: Action, updated: int, unfinished: Sequence[int]) -> str | None:
    """What is wrong with an update that comes after ``updated`` others; ``unfinished``: units left of each batch."""
    batch, batches = action.micro_batch, len(unfinished)
    if not 0 <= batch < batches:
        return f"{action} is the update of none of {batches} batches"
    if batch != updated:
        return f"{action} comes where U{updated} was expected"
    return f"{action} comes before the last backward of batch {batch}" if unfinished[batch] else None


def _version_fault(schedule: Schedule, stage: int) -> tuple[int, str] | None:
    """The first step of ``stage`` that breaks the version rule of PipeDream-2BW §3.1, and how; None without a fault.

    A stage has two buffers. The update of batch t writes W(t+1) over W(t−1), so all of batch t must be backwarded by
    then: its forwards and backwards, each there once, are the last that use W(t−1). What a forward or backward needs
    has thus never been overwritten; it may only not be there yet.
    """
    row, micro_batches, batches = schedule.actions[stage], schedule.micro_batches, schedule.batches
    updated = 0  # batches; W(updated) is the newest version
    unfinished = [micro_batches * schedule.chunks] * batches
    for step, action in enumerate(row):
        if action.kind == UPDATE:
            if (fault := _update_fault(action, updated, unfinished)) is not None:
                return step, fault
            updated += 1
        elif action.kind in COMPUTE:
            batch = action.micro_batch // micro_batches
            needed = required_version(batch)
            if needed > updated:
                return step, f"{action} needs weight version {needed}, which is not there yet"
            unfinished[batch] -= action.kind in FINISHING
    if updated < batches:
        return len(row) - 1, f"U{updated} is missing"
    if (in_flight := own_peak(schedule.table.kind[schedule.table.of(stage)])) > (
        allowed := (schedule.stages - stage) * schedule.chunks
    ):
        return 0, f"stage {stage} has {in_flight} micro-batches in flight; 2bw allows {allowed}"
    return None
