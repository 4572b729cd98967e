"""Where a stage stands still and what for, and what else the pipeline could do, simulated from the same times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final, Literal, NamedTuple

from evenpipe.schedule import (
    COMPUTE,
    KINDS,
    LOAD,
    UPDATE,
    Action,
    Link,
    Places,
    Program,
    Schedule,
    ScheduleError,
    Size,
    Spec,
    build,
    find,
)
from evenpipe.simulate import Costs, Span, Wire, simulate

__all__ = ["Alternative", "Case", "Reason", "Room", "Wait", "Waits", "alternatives", "waits_in", "with_messages"]

Reason = Literal["start", "forward", "backward", "transfer", "itself", "end"]
_BUSY: Final = COMPUTE | {UPDATE}
#: Shorter ones are not told: clocks and function calls take as long.
_LEAST_MS: Final = 1e-3
_Key = tuple[int, str, Action]


class Wait(NamedTuple):
    """All waits of one stage for one thing, in a batch.

    reason: "start" and "end": before its first and after its last action; "forward" and "backward": for a message from
    ``source``; "transfer": for what its partner keeps; "itself": for nothing that came from elsewhere. total_ms: of
    them all, of which message_ms passed when what was waited for had been computed. times: how many; longest_ms: one.
    """

    stage: int
    reason: Reason
    source: int | None
    total_ms: float
    message_ms: float
    times: int
    longest_ms: float

    def to_json(self) -> dict[str, Any]:
        return self._asdict()


class Waits(NamedTuple):
    """All that stages wait for; message_ms: by (reason, source, target), what a message takes that was waited for."""

    batch_ms: float
    stages: tuple[Wait, ...]
    message_ms: dict[tuple[Reason, int, int], float]

    def share(self, wait: Wait) -> float:
        """Return the part of the batch that the stage spends so."""
        return wait.total_ms / self.batch_ms if self.batch_ms else 0.0


class _Gap(NamedTuple):
    """A stage did nothing from ``start_ms`` on, until the start of an action that takes from ``source``."""

    stage: int
    action: Action
    start_ms: float
    end_ms: float
    reason: Reason | None
    source: int | None
    ready_ms: float | None
    moved_ms: float | None


def waits_in(places: Places, stages: Sequence[Sequence[Span]]) -> Waits:
    """Return what each stage waits for; ``stages``: the spans of a batch, measured or simulated, from a common start.

    A gap before an action belongs to the input that came last: its neighbour's message, or what its partner keeps of
    its micro-batch. If all inputs had long been there, the gap belongs to the stage itself. The time of messages is the
    median over those that were certainly waited for: the receiver was idle before they were sent.
    """
    batch_ms = max((span.end_ms for spans in stages for span in spans), default=0.0)
    gaps = list(_gaps(places, stages))
    message_ms = _messages(gaps)
    found: dict[tuple[int, Reason, int | None], list[tuple[float, float]]] = defaultdict(list)
    for gap in gaps:
        reason, source, message = _blamed(gap, message_ms)
        found[gap.stage, reason, source].append((gap.end_ms - gap.start_ms, message))
    for stage, spans in enumerate(stages):
        busy = [span for span in spans if span.action.kind in _BUSY]
        if busy:
            found[stage, "start", None].append((min(span.start_ms for span in busy), 0.0))
            found[stage, "end", None].append((batch_ms - max(span.end_ms for span in busy), 0.0))
    waits = (
        Wait(*key, sum(ms for ms, _ in each), sum(ms for _, ms in each), len(each), max(ms for ms, _ in each))
        for key, each in found.items()
    )
    told = sorted((wait for wait in waits if wait.total_ms > _LEAST_MS), key=lambda wait: (wait.stage, -wait.total_ms))
    return Waits(batch_ms, tuple(told), message_ms)


def _gaps(places: Places, stages: Sequence[Sequence[Span]]) -> Iterator[_Gap]:
    ends = _ends(stages)
    for stage, spans in enumerate(stages):
        loads = {span.action.unit: span.end_ms for span in spans if span.action.kind == LOAD}
        before: float | None = None
        for action, start_ms, end_ms in sorted(spans, key=lambda span: span.start_ms):
            if action.kind not in _BUSY:
                continue
            if before is not None and start_ms - before > _LEAST_MS:
                reason, source, ready = _input(places, stage, action, ends)
                moved = loads.get(action.unit) if KINDS[action.kind].direction < 0 else None
                yield _Gap(stage, action, before, start_ms, reason, source, ready, moved)
            before = end_ms if before is None else max(before, end_ms)


def _ends(stages: Iterable[Sequence[Span]]) -> dict[_Key, float]:
    """When results that neighbours take were there, by (stage, "forward" or "backward", a forward of the unit)."""
    return {
        (stage, _direction(action), Action("F", *action.unit)): end_ms
        for stage, spans in enumerate(stages)
        for action, _, end_ms in spans
        if KINDS[action.kind].direction
    }


def _direction(action: Action) -> Reason:
    return "forward" if KINDS[action.kind].direction > 0 else "backward"


def _input(
    places: Places, stage: int, action: Action, ends: dict[_Key, float]
) -> tuple[Reason | None, int | None, float | None]:
    """From which stage an action takes its input, and when that was computed."""
    direction = KINDS[action.kind].direction
    sender = places.neighbour(stage, action.chunk, -direction) if direction else None
    if sender is None or sender.stage == stage:
        return None, None, None
    reason = _direction(action)
    ready = ends.get((sender.stage, reason, Action("F", action.micro_batch, sender.chunk)))
    return reason, sender.stage, ready


def _messages(gaps: Iterable[_Gap]) -> dict[tuple[Reason, int, int], float]:
    taken: dict[tuple[Reason, int, int], list[float]] = defaultdict(list)
    for gap in gaps:
        waited = gap.ready_ms is not None and gap.start_ms <= gap.ready_ms <= gap.end_ms
        transferred = gap.moved_ms is not None and gap.ready_ms is not None and gap.moved_ms > gap.ready_ms
        if waited and not transferred and gap.reason is not None and gap.source is not None:
            taken[gap.reason, gap.source, gap.stage].append(gap.end_ms - (gap.ready_ms or 0.0))
    return {link: median(times) for link, times in taken.items()}


def _blamed(gap: _Gap, message_ms: dict[tuple[Reason, int, int], float]) -> tuple[Reason, int | None, float]:
    """Return what a gap is for: reason, source, and how much of it passed with a message under way."""
    if gap.moved_ms is not None and gap.start_ms < gap.moved_ms <= gap.end_ms and gap.moved_ms > (gap.ready_ms or 0.0):
        return "transfer", None, 0.0
    if gap.reason is None or gap.source is None or gap.ready_ms is None:
        return "itself", None, 0.0
    if gap.ready_ms >= gap.start_ms:
        return gap.reason, gap.source, max(0.0, gap.end_ms - gap.ready_ms)
    arrived = gap.ready_ms + message_ms.get((gap.reason, gap.source, gap.stage), 0.0)
    if arrived - gap.start_ms > (gap.end_ms - gap.start_ms) / 2:
        return gap.reason, gap.source, gap.end_ms - gap.start_ms
    return "itself", None, 0.0


_GROUPS: Final = (2, 3, 4)


class Room(NamedTuple):
    """The memory of each stage for everything but saved activations, in bytes.

    beside: what stays whatever the schedule is: weights, their gradients, what the optimizer keeps. versions: what each
    further version of the weights takes, with the gradients that are kept for it. limit_bytes: of a stage's device,
    None where none is known.
    """

    beside: Sequence[int]
    versions: Sequence[int]
    limit_bytes: int | None = None


class Case(NamedTuple):
    """A simulation to run: a program without a table of a user's own, its times, and what a micro-batch saves.

    able: which engine carries a schedule out, None being the present one. room: None where nothing is known of it; of
    use where unit_bytes is known. divided: whether the stages' times are as equal as they can be.
    """

    schedule: Schedule
    bpipe: bool
    costs: Costs
    unit_bytes: Sequence[Sequence[int]] | None
    able: Callable[[Spec], str | None] = lambda spec: None
    room: Room | None = None
    divided: bool = False


class Alternative(NamedTuple):
    """One thing that could be different, and what simulation makes of it.

    batch_ms: of as many micro-batches as now. peak: the fullest stage's, in bytes, or in
    micro-batches where sizes are unknown. change: "schedule", or what else it is. flags: what to give;
    engine: who carries it out, None: the present one. versions: of the weights. needs: of the fullest stage all that it
    holds, in bytes, where that is known; version_bytes: of that, most of any stage, further versions of its weights.
    """

    change: str
    text: str
    flags: str
    batch_ms: float
    peak: float
    waits: Waits
    engine: str | None = None
    versions: int = 1
    needs: int | None = None
    version_bytes: int | None = None
    fits: bool = True


def with_messages(costs: Costs, waits: Waits) -> Costs:
    """Return the costs with each link as slow as its messages were; one of which nothing is known is free."""
    links = {
        Link("forward" if reason == "forward" else "backward", source, target): Wire(transmit_ms=ms)
        for (reason, source, target), ms in waits.message_ms.items()
    }
    return replace(costs, links=links)


def alternatives(case: Case) -> list[Alternative]:
    """Return the present case first; then whatever else can be built of it, the fastest first."""
    present = _of(case, "none", "as it is", "", case.schedule.batches)
    others = [one for one in _others(case) if one is not None]
    return [present, *sorted(others, key=lambda one: one.batch_ms)] if present is not None else []


def _others(case: Case) -> Iterator[Alternative | None]:
    schedule, micro_batches = case.schedule, case.schedule.micro_batches
    for k in _GROUPS:
        if k != schedule.group_size and k < micro_batches:
            yield _scheduled(case, "kfkb", f"--schedule kfkb --group-size {k}", group_size=k)
    yield _scheduled(case, "1f1b", "--schedule 1f1b")
    yield _scheduled(case, "zb-h1", "--schedule zb-h1")
    if schedule.chunks == 1:
        yield _scheduled(case, "interleaved", "--schedule interleaved --chunks 2", chunks=2)
    yield _scheduled(case, "2bw", "--schedule 2bw", batches=4)
    if schedule.batches == 1:
        twice = _resized(case, micro_batches=2 * micro_batches)
        yield None if twice is None else _of(twice, "more", "twice as many micro-batches", "", 2)
    if not case.divided and max(_each(case.costs)) > 1.02 * sum(_each(case.costs)) / schedule.stages:
        yield _of(case._replace(costs=_even(case.costs)), "even", "stages of equal times", "evenpipe partition", 1)
    if case.bpipe:
        without = _resized(case, bpipe=False)
        yield None if without is None else _of(without, "transfers", "without BPipe", "without --bpipe", 1)


def _scheduled(case: Case, name: str, flags: str, **size: int) -> Alternative | None:
    schedule, spec = case.schedule, find(name)
    same = schedule.name == name and all(getattr(schedule, key) == value for key, value in size.items())
    if same or (name == schedule.name == "2bw"):
        return None
    other = _resized(case, name, None, **({"chunks": 1, "group_size": 1, "batches": 1} | size))
    if other is None:
        return None
    text = f"{name}, k={size['group_size']}" if "group_size" in size else name
    text += ", 2 chunks a stage" if "chunks" in size else ""
    text += ", gradients a batch late" if name == "2bw" else ""
    text += " without BPipe" if case.bpipe and not other.bpipe else ""
    one = _of(other, "schedule", text, flags, 1)
    return None if one is None else one._replace(engine=case.able(spec))


def _resized(case: Case, name: str | None = None, bpipe: bool | None = None, **size: int) -> Case | None:
    """Return the case with another schedule, under BPipe where it was and can be; None where there is no such."""
    old = case.schedule
    now = Size(old.stages, old.micro_batches, old.chunks, old.group_size, old.batches)._replace(**size)
    try:
        spec = find(name or old.name)
        program = build(spec, now, (case.bpipe if bpipe is None else bpipe) and spec.balanced is not None)
    except ScheduleError:
        return None
    schedule = program.schedule
    sizes = None
    if case.unit_bytes is not None:
        sizes = [[sum(row) // schedule.chunks] * schedule.chunks for row in case.unit_bytes]
    costs = case.costs if schedule.places == old.places else replace(case.costs, parts_ms=None)
    return case._replace(schedule=schedule, bpipe=any(schedule.evictions), costs=costs, unit_bytes=sizes)


def _of(case: Case, change: str, text: str, flags: str, batches: int) -> Alternative | None:
    """Simulated; of a stream, or of ``batches`` in one, the time of one."""
    program = Program(case.schedule, case.bpipe)
    simulation = simulate(program, case.costs, case.unit_bytes)
    batch_ms = simulation.makespan_ms / batches
    if case.schedule.batches > 1:
        batch_ms = _steady_ms(case, simulation.makespan_ms)
    known = case.unit_bytes is not None
    peak = max(stage.peak_bytes if known else stage.peak_live / case.schedule.chunks for stage in simulation.stages)
    waits = waits_in(case.schedule.places, simulation.timeline)
    versions = case.schedule.weight_versions
    one = Alternative(change, text, flags, batch_ms, peak, waits, versions=versions)
    if case.room is None or not known:
        return one
    room, further = case.room, [(versions - 1) * nbytes for nbytes in case.room.versions]
    saved = [stage.peak_bytes for stage in simulation.stages]
    needs = max(sum(each) for each in zip(saved, room.beside, further, strict=True))
    fits = room.limit_bytes is None or needs <= room.limit_bytes
    return one._replace(needs=needs, version_bytes=max(further), fits=fits)


def _steady_ms(case: Case, makespan_ms: float) -> float:
    """Return the milliseconds that one more batch of a stream takes; their mean if no shorter stream can be built."""
    batches = case.schedule.batches
    shorter = _resized(case, batches=batches - 1)
    if shorter is None:
        return makespan_ms / batches
    return makespan_ms - simulate(Program(shorter.schedule, shorter.bpipe), case.costs).makespan_ms


def _each(costs: Costs) -> list[float]:
    return [sum(both) for both in zip(costs.forward_ms, costs.backward_ms, strict=True)]


def _even(costs: Costs) -> Costs:
    def mean(times: Sequence[float]) -> tuple[float, ...]:
        return (sum(times) / len(times),) * len(times)

    weights = costs.weight_gradient_ms
    return replace(
        costs,
        forward_ms=mean(costs.forward_ms),
        backward_ms=mean(costs.backward_ms),
        weight_gradient_ms=None if weights is None else mean(weights),
        parts_ms=None,
    )
