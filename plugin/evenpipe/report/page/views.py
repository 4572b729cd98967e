"""What a page shows of a run, of a simulation, and of runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from evenpipe.report.bubbles import Case, Room, Waits, alternatives, waits_in, with_messages
from evenpipe.report.log_line import median_ms
from evenpipe.report.page.content import (
    Drawn,
    Pairs,
    RunDocument,
    SimulationDocument,
    Table,
    View,
    amount,
    milliseconds,
    percent,
)
from evenpipe.report.page.words import alternatives_table, explained, summary, waits_table
from evenpipe.schedule import COMPUTE, UPDATE, Action, Places, Schedule, ScheduleError, Spec, loop, verify
from evenpipe.simulate import Costs, MemoryPoint, SimulationError, Span

__all__ = [
    "DIFFERENT",
    "SAME",
    "busy",
    "chosen_view",
    "compared",
    "comparison_view",
    "run_view",
    "simulated_view",
    "simulation_view",
]

_BUSY: Final = COMPUTE | {UPDATE}
_GIB: Final = 2**30
#: A last iteration that is off by more is not like the others.
_ALIKE: Final = 0.25


def run_view(run: RunDocument, able: Callable[[Spec], str | None]) -> View:
    """Return a run: its last iteration as measured, over the prediction. ``able``: see `evenpipe.report.bubbles.Case`.

    Raises ValueError, one line, where parts of the document do not fit each other.
    """
    predicted, spans = run.predicted, run.spans()
    _same_stages(len(spans), timeline=predicted.timeline, stages=run.stages, memory=run.memory)
    schedule, costs = predicted.schedule, predicted.simulated_costs()
    measured = Drawn("measured", spans, run.held(), sized=True)
    beside = _beside(spans, predicted, schedule)
    waits = waits_in(_places(schedule, spans), spans)
    batch_ms = max((span.end_ms for row in spans for span in row), default=0.0)
    told, tables = _explained(waits, schedule, costs, predicted.unit_bytes, able, _room(run))
    typical_ms = median_ms(run.iteration_ms)
    losses = [loss for loss in run.losses if loss is not None]
    facts = [
        (
            "Iterations",
            f"{len(run.iteration_ms)}" + (f", from {run.first_iteration + 1}" if run.first_iteration else ""),
        ),
        ("Iteration, median", milliseconds(typical_ms)),
        ("Last batch, drawn", milliseconds(batch_ms)),
        ("Fullest stage, saved activations", amount(max(stage.peak_saved_bytes for stage in run.stages))),
        ("Fullest stage, predicted", amount(max(stage.predicted_peak_bytes for stage in run.stages))),
        *([("Loss", f"{losses[0]:.4f} to {losses[-1]:.4f}")] if losses else []),
        ("Device", run.device),
    ]
    return View(
        run.title,
        facts,
        [measured, beside],
        _measured_stages(run, spans, waits),
        told,
        [*tables, *_retuned(run.retunes)],
        [(name, "" if value is None else str(value)) for name, value in run.settings.items()],
        list(run.versions.items()),
        summary(waits),
        list(_unlike(run, typical_ms)),
    )


def _room(run: RunDocument) -> Room:
    """Return what stages held beside saved activations, and the limit that the run was given, if any."""
    limit_gib = run.settings.get("memory_gib")
    return Room(
        [stage.static_bytes + stage.message_bytes for stage in run.stages],
        # Before it had any: weights, and the gradients of the batch before until their step.
        [stage.weight_version_bytes or 2 * stage.parameter_bytes for stage in run.stages],
        int(limit_gib * _GIB) if isinstance(limit_gib, int | float) else None,
    )


def _unlike(run: RunDocument, typical_ms: float) -> Iterator[str]:
    """Documents have the actions of the last iteration alone, which may have been an unusual one."""
    last_ms = run.iteration_ms[-1]
    if typical_ms and abs(last_ms / typical_ms - 1) > _ALIKE:
        yield (
            f"The iteration that is drawn, the last one, took {milliseconds(last_ms)}, {last_ms / typical_ms:.2g}× the "
            f"median of {milliseconds(typical_ms)}: other iterations look different."
        )


def simulation_view(document: SimulationDocument) -> View:
    """Return a simulation. Raises ValueError, one line, where parts of the document do not fit each other."""
    schedule = document.schedule
    title = "simulation" if schedule is None else _title(schedule)
    return simulated_view(title, document, document.unit_bytes, settings=_costs(document.simulated_costs()))


def simulated_view(
    title: str,
    document: SimulationDocument,
    unit_bytes: Sequence[Sequence[int]] | None,
    facts: Pairs = (),
    stages: Table | None = None,
    settings: Pairs = (),
    more: Sequence[Table] = (),
    room: Room | None = None,
) -> View:
    """Return a simulation or a partition; ``stages`` takes the place of the simulation's table.

    room: a partition's, whose stages are already divided as well as they can be.
    """
    spans, schedule = document.spans(), document.schedule
    _same_stages(len(spans), stages=document.stages, memory=document.memory or spans)
    drawn = Drawn("predicted", spans, document.held(), sized=unit_bytes is not None)
    waits = waits_in(_places(schedule, spans), spans)
    costs = document.simulated_costs()
    told, tables = _explained(
        waits, schedule, costs, unit_bytes, lambda spec: None, room, measured=False, divided=room is not None
    )
    rows = [
        (f"stage {number}", milliseconds(stage.busy_ms), milliseconds(stage.idle_ms), str(stage.peak_live))
        for number, stage in enumerate(document.stages)
    ]
    simulated = Table("Each stage", ("Stage", "Computes", "Is idle", "Most live micro-batches (× chunks)"), rows)
    found = [
        *facts,
        ("Time, predicted", milliseconds(document.makespan_ms)),
        ("Bubble, predicted", percent(document.bubble_fraction, 1)),
    ]
    tables = [*more, *tables]
    return View(title, found, [drawn], stages or simulated, told, tables, settings, summary=summary(waits))


def chosen_view(title: str, document: SimulationDocument, facts: Pairs, stages: Table, settings: Pairs = ()) -> View:
    """The simulation of what was chosen among all that there is: no alternatives to it are simulated here."""
    spans = document.spans()
    waits = waits_in(_places(document.schedule, spans), spans)
    drawn = Drawn("predicted", spans, document.held(), sized=False)
    told = explained(waits, None, [])
    return View(title, facts, [drawn], stages, told, [waits_table(waits)], settings, summary=summary(waits))


def _explained(
    waits: Waits,
    schedule: Schedule | None,
    costs: Costs | None,
    unit_bytes: Sequence[Sequence[int]] | None,
    able: Callable[[Spec], str | None],
    room: Room | None,
    measured: bool = True,
    divided: bool = False,
) -> tuple[list[str], list[Table]]:
    """Sentences, and the tables that they are of. Raises ValueError where schedule and costs do not fit each other."""
    if schedule is None or costs is None:
        said = "What would be faster cannot be told: the document lacks the schedule and its costs."
        return [*explained(waits, None, []), said], [waits_table(waits)]
    try:
        program = verify(schedule, any(schedule.evictions))
        costs = with_messages(costs, waits) if measured else costs
        case = Case(program.schedule, any(schedule.evictions), costs, unit_bytes, able, room, divided)
        simulated = alternatives(case)
    except (ScheduleError, SimulationError) as error:
        raise ValueError(f"schedule: {error}") from error
    return explained(waits, case, simulated), [alternatives_table(case, simulated), waits_table(waits)]


def _beside(spans: Sequence[Sequence[Span]], predicted: SimulationDocument, schedule: Schedule | None) -> Drawn:
    """Return the prediction of what was measured: of a stream, which was simulated as its last batches, that part."""
    rows, held = predicted.spans(), predicted.held()
    if schedule is None or schedule.batches == 1:
        return Drawn("predicted", rows, held, sized=True)
    measured = {span.action for row in spans for span in row}
    last = max(action.micro_batch for action in measured if action.kind in COMPUTE)
    ahead = last + 1 - schedule.micro_batches * schedule.batches

    def along(action: Action) -> Action:
        by = ahead // schedule.micro_batches if action.kind == UPDATE else ahead
        return action._replace(micro_batch=action.micro_batch + by)

    kept = [
        [span._replace(action=along(span.action)) for span in row if along(span.action) in measured] for row in rows
    ]
    start = min((span.start_ms for row in kept for span in row), default=0.0)
    shifted = [[Span(a, begin - start, end - start) for a, begin, end in row] for row in kept]
    return Drawn("predicted", shifted, [_from(start, points) for points in held], sized=True)


def _from(start: float, points: Sequence[MemoryPoint]) -> list[MemoryPoint]:
    """Return what is held from ``start`` on, counted from there."""
    before = [point for point in points if point.at_ms <= start][-1:]
    return [p._replace(at_ms=max(0.0, p.at_ms - start)) for p in (*before, *(q for q in points if q.at_ms > start))]


def _measured_stages(run: RunDocument, spans: Sequence[Sequence[Span]], waits: Waits) -> Table:
    rows = []
    for number, (stage, row) in enumerate(zip(run.stages, spans, strict=True)):
        busy = sum(end - start for action, start, end in row if action.kind in _BUSY)
        rows.append(
            (
                f"stage {number}",
                milliseconds(busy),
                percent(1 - busy / waits.batch_ms) if waits.batch_ms else "",
                amount(stage.peak_saved_bytes),
                amount(stage.predicted_peak_bytes),
                str(stage.peak_live),
                amount(stage.evicted_bytes),
                amount(stage.parameter_bytes),
            )
        )
    columns = ("Stage", "Computes", "Is idle", "Peak saved", "Predicted", "Most live", "Evicted", "Parameters")
    return Table("Each stage: the last iteration's time, and peaks over all iterations", columns, rows)


def _retuned(retunes: Sequence[dict[str, Any]]) -> Iterator[Table]:
    if not retunes:
        return
    rows = []
    for one in retunes:
        estimates = one.get("estimates_ms")
        said = estimates.items() if isinstance(estimates, dict) else ()
        each = ", ".join(f"{name} {ms:,.4g} ms" for name, ms in said if isinstance(ms, int | float))
        iteration = one.get("iteration")
        iteration = iteration + 1 if isinstance(iteration, int) else iteration
        rows.append((*map(str, (iteration, one.get("k"), one.get("b"))), each))
    columns = ("From iteration", "Group size k", "Micro-batch size b", "Estimates")
    yield Table("Retunes: group and micro-batch sizes that were chosen while training", columns, rows)


def _places(schedule: Schedule | None, spans: Sequence[Sequence[Span]]) -> Places:
    if schedule is not None:
        return schedule.places
    return loop(len(spans), 1 + max((span.action.chunk for row in spans for span in row), default=0))


def _same_stages(count: int, **parts: Sequence[Any]) -> None:
    for name, part in parts.items():
        if len(part) != count:
            raise ValueError(f"{name}: has {len(part)} stages, timeline has {count}")


def _title(schedule: Schedule) -> str:
    name = f"{schedule.name} with BPipe" if any(schedule.evictions) else schedule.name
    group = f", k={schedule.group_size}" if schedule.group_size > 1 else ""
    batches = f" × {schedule.batches} batches" if schedule.batches > 1 else ""
    return f"{name}{group}, {schedule.stages} stages, {schedule.micro_batches} micro-batches{batches}"


def _costs(costs: Costs | None) -> Pairs:
    if costs is None:
        return ()
    times = {"forward_ms": costs.forward_ms, "backward_ms": costs.backward_ms}
    wires = [
        (f"{kind}, ms a message", f"{wire.latency_ms + wire.transmit_ms:,.4g}") for kind, wire in costs.wires.items()
    ]
    return [*((name, ", ".join(f"{ms:,.4g}" for ms in row)) for name, row in times.items()), *wires]


SAME: Final = "bit-identical"
DIFFERENT: Final = "DIFFERENT"
_MIB: Final = 2**20


def compared(runs: Mapping[str, RunDocument]) -> Table:
    """Return a column a run; losses and weights against those of the first."""
    first, *others = runs.values()
    rows = [("last loss", *(_last_loss(run) for run in runs.values()))]
    rows.append(("all losses", "reference", *(_sameness(first.losses_hex, run.losses_hex) for run in others)))
    rows.append(
        ("final weights", "reference", *(_sameness(first.weights_sha256, run.weights_sha256) for run in others))
    )
    for number in range(min(len(run.stages) for run in runs.values())):
        peaks = (run.stages[number].peak_saved_bytes / _MIB for run in runs.values())
        rows.append((f"stage {number}: peak saved", *(f"{peak:.2f} MiB" for peak in peaks)))
    rows.append(("median iteration", *(f"{median_ms(run.iteration_ms):.0f} ms" for run in runs.values())))
    name = next(iter(runs))
    caption = f"{SAME}: equal to {name} in every bit, over all iterations; median: of all iterations but the first"
    return Table(caption, ("", *runs), rows)


def comparison_view(runs: Mapping[str, RunDocument], machine: Any) -> View:
    """Return how a page of several runs begins. ``machine``: what a document says of it, if anything."""
    table = compared(runs)
    facts = [
        (f"{row[0].capitalize()}, of {len(runs)} runs", "; ".join(dict.fromkeys(row[2:])))
        for row in table.rows
        if row[1] == "reference" and len(row) > 2
    ]
    facts += [
        (f"Fullest stage, {name}", amount(max(stage.peak_saved_bytes for stage in run.stages)))
        for name, run in runs.items()
    ]
    return View("Side by side", facts, (), table, notes=list(busy(machine)))


def busy(machine: Any) -> Iterator[str]:
    """A line where more was running before the runs than there are cores; ``machine``: load_before and cores."""
    if not isinstance(machine, dict):
        return
    load, cores = machine.get("load_before"), machine.get("cores")
    if isinstance(load, int | float) and isinstance(cores, int | float) and load > cores:
        yield (
            f"The machine was busy before the first run started: a load of {load:.1f} on "
            f"{cores:g} {'core' if cores == 1 else 'cores'}. Times are not those of an idle one, and compare badly."
        )


def _last_loss(run: RunDocument) -> str:
    loss = run.losses[-1] if run.losses else None
    return "" if loss is None else f"{loss:.6f}"


def _sameness(reference: Any, other: Any) -> str:
    if reference is None or other is None:
        return "not recorded"
    return SAME if reference == other else DIFFERENT
