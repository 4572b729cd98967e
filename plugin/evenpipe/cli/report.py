"""``evenpipe report``: one HTML page of a run, a simulation, a partition or a plan."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from evenpipe.cli.parser import Commands, UsageError, add_command
from evenpipe.cli.values import output_file, write
from evenpipe.partition.search.plan import Plan as Partition
from evenpipe.planner.search.plan import PlannedRun
from evenpipe.planner.uncertainty import Uncertainty
from evenpipe.report.bubbles import Room
from evenpipe.report.files import write_atomically
from evenpipe.report.page.content import (
    Pairs,
    RunDocument,
    SimulationDocument,
    Table,
    View,
    amount,
    milliseconds,
    percent,
)
from evenpipe.report.page.views import chosen_view, comparison_view, run_view, simulated_view, simulation_view
from evenpipe.schedule import Program, Size, Spec, build
from evenpipe.simulate import Costs, simulate, simulation_document
from evenpipe.train.engines import ENGINES
from evenpipe.wording.validation import first_message

if TYPE_CHECKING:
    from evenpipe.partition.search.plan import Plan as Partition
    from evenpipe.planner.search.plan import PlannedRun

__all__ = ["add_to", "demo_views", "partition_view", "plan_view", "write_page"]

#: Micro-batches × stages of a plan that are drawn at most: its batches may have hundreds.
_MOST_DRAWN: Final = 1024


def partition_view(document: dict[str, Any]) -> View:
    """Return a partition, simulated where it is of a schedule that trains, and not of PipeDream's."""
    from evenpipe.cli.partition_shown import division
    from evenpipe.partition.dawnpiper.copies import PIPEDREAM
    from evenpipe.partition.search.plan import Plan as Partition

    plan = Partition.model_validate(document)
    way = division("", plan.stages)
    rows = [
        (
            f"stage {stage}",
            *(milliseconds(ms[stage]) for ms in (way.forward_ms, way.backward_ms, way.extra_ms)),
            *(amount(peaks[stage]) for peaks in (way.peak_bytes, way.peak_bytes_before)),
        )
        for stage in range(plan.stage_count)
    ]
    columns = ("Stage", "Forward", "Backward", "Recompute, swap", "Peak", "Peak before that")
    stages = Table("Each stage: a micro-batch's times, and peaks", columns, rows)
    facts = [
        ("Slowest part, a micro-batch", milliseconds(plan.max_stage_ms)),
        ("No partition is below", milliseconds(plan.optimum_ms)),
        ("Fullest stage", amount(max(way.peak_bytes))),
        ("Limit", amount(plan.limit_bytes)),
    ]
    settings = [*_settings(plan.origin.model_dump(mode="json")), ("optimize", plan.optimize)]
    title = (
        f"{plan.origin.model}: {plan.schedule}{_bpipe(plan.bpipe)}, {plan.stage_count} stages, "
        f"{plan.micro_batches} micro-batches"
    )
    if plan.schedule == PIPEDREAM:
        return View(title, facts, (), stages, tables=[_parts(plan)], settings=settings)
    unit_bytes = _kept(plan)
    simulated = _simulated(plan.program, plan.costs, unit_bytes)
    if unit_bytes is None:
        view = chosen_view(title, simulated, facts, stages, settings)
        said = "What else would be faster, and fits, cannot be told: the document is of an older release."
        return view._replace(explained=[*view.explained, said], tables=[_parts(plan), *view.tables])
    return simulated_view(title, simulated, unit_bytes, facts, stages, settings, [_parts(plan)], _room(plan))


def _kept(plan: Partition) -> list[list[int]] | None:
    """Return the bytes that a micro-batch keeps, by stage and chunk; None where the document does not say."""
    kept: list[list[int]] = [[] for _ in range(plan.stage_count)]
    for part in plan.stages:
        if part.kept_bytes is None or part.weight_bytes is None or part.beside_bytes is None:
            return None
        kept[part.stage].append(part.kept_bytes)
    return kept


def _room(plan: Partition) -> Room:
    """Another schedule would recompute and swap the same."""
    beside, versions = [0] * plan.stage_count, [0] * plan.stage_count
    for part in plan.stages:
        beside[part.stage] += part.beside_bytes or 0
        versions[part.stage] += part.weight_bytes or 0
    return Room(beside, versions, plan.limit_bytes)


def _parts(plan: Partition) -> Table:
    rows = [
        (
            str(number),
            f"stage {part.stage}",
            f"{part.first_node}–{part.last_node}",
            str(len(part.recompute)),
            str(len(part.swap)),
        )
        for number, part in enumerate(plan.stages)
    ]
    return Table("Parts of the model", ("Part", "Where", "Nodes", "Recomputed", "Swapped"), rows)


def plan_view(document: dict[str, Any]) -> View:
    """Return a plan: its fastest run simulated, and all the others. Raises ValueError, one line, where it has none."""
    from evenpipe.planner.search.plan import Plan

    plan = Plan.model_validate(document)
    if not plan.plans:
        raise ValueError("plans: there is no run that fits")
    best = plan.plans[0]
    program, cut = _drawn_program(best)
    costs = Costs(
        tuple(stage.forward_ms for stage in best.each_stage), tuple(stage.backward_ms for stage in best.each_stage)
    )
    kinds = list(dict.fromkeys(kind for stage in best.each_stage for kind in stage.bytes))
    rows = [
        (
            f"stage {number}",
            milliseconds(stage.forward_ms),
            milliseconds(stage.backward_ms),
            *(amount(stage.bytes.get(kind, 0)) for kind in kinds),
        )
        for number, stage in enumerate(best.each_stage)
    ]
    columns = ("Stage", "Forward", "Backward", *(kind.replace("_", " ") for kind in kinds))
    simulated = _simulated(program, costs)
    count = f"{cut} of " if cut < best.micro_batches else ""
    sure = Uncertainty(**best.uncertainty)  # type: ignore[arg-type]
    facts = [
        ("Iteration", milliseconds(best.iteration_ms)),
        ("Iteration, interval", _interval(best.iteration_ms, sure)),
        ("Bubble", percent(best.bubble, 1)),
        ("Samples a second", f"{best.samples_per_second:,.4g}"),
        ("Tokens a second and GPU", f"{best.tokens_per_second_per_gpu:,.4g}"),
        ("TFLOP/s of a GPU, as Megatron-LM logs it", f"{best.logged_tflops_per_gpu:,.1f}"),
        ("MFU, as papers count it", percent(best.mfu, 1)),
        ("Fullest GPU", f"{best.memory_gib:.1f} of {plan.device_gib:g} GiB"),
    ]
    view = chosen_view(
        f"{plan.model} on {plan.cluster}, {plan.framework}",
        simulated,
        facts,
        Table("Each stage of the fastest run: a micro-batch's times, and what a GPU holds", columns, rows),
        _settings(plan.model_dump(mode="json", exclude={"plans", "front", "rejected"}) | {"flags": best.flags}),
    )
    note = (
        "These figures are the planner's, of a whole iteration with its messages and its step. Drawn, and in words "
        f"below it, are the stages' times alone: {count}{best.micro_batches} micro-batches, simulated to take "
        f"{milliseconds(simulated.makespan_ms)} with a bubble of {percent(simulated.bubble_fraction, 1)}."
    )
    weighed = (
        f"Of all runs that it may choose, the planner found none faster that fits into {plan.device_gib:g} GiB: "
        f"{plan.runs['weighed']:,} were weighed, and the best of each schedule is in the table of those not taken."
    )
    tables = [
        _runs("The fastest runs", plan.plans),
        _runs("The Pareto front of memory against speed", plan.front),
        Table("Not taken", ("Runs", "Why"), [(one.family, one.reason) for one in plan.rejected]),
    ]
    notes = [note, f"The interval of an iteration: {sure.meaning}."]
    tables = [*tables, *view.tables]
    return view._replace(notes=notes, commands=plan.commands, explained=[*view.explained, weighed], tables=tables)


def _interval(ms: float, sure: Uncertainty) -> str:
    if sure.low is None or sure.high is None:
        return str(sure)
    return f"{milliseconds(ms * (1 + sure.low))} to {milliseconds(ms * (1 + sure.high))} ({sure})"


def _drawn_program(run: PlannedRun) -> tuple[Program, int]:
    """Return the run's schedule, with no more micro-batches than can be seen, and how many these are."""
    count = min(run.micro_batches, max(2 * run.stages, _MOST_DRAWN // run.stages // run.stages * run.stages))
    size = Size(run.stages, count, run.chunks, run.group_size, 3 if run.schedule == "2bw" else 1)
    return build(run.schedule, size, run.bpipe), count


def _simulated(program: Program, costs: Costs, unit_bytes: Sequence[Sequence[int]] | None = None) -> SimulationDocument:
    """In the form in which `evenpipe simulate` writes it."""
    found = simulate(program, costs, unit_bytes)
    return SimulationDocument.model_validate(simulation_document(program, costs, found, unit_bytes))


def _runs(caption: str, runs: list[PlannedRun]) -> Table:
    rows = [
        (
            f"{run.schedule}{_bpipe(run.bpipe)}" + (f", k={run.group_size}" if run.group_size > 1 else ""),
            *map(str, (run.tensor_parallel, run.stages, run.data_parallel, run.chunks, run.micro_batch_size)),
            *(run.recompute, f"{run.memory_gib:.1f}", percent(run.bubble, 1), percent(run.mfu, 1)),
            f"{run.samples_per_second:,.4g}",
        )
        for run in runs
    ]
    names = ("Schedule", "t", "p", "d", "v", "b", "Recompute", "GiB", "Bubble", "MFU", "Samples/s")
    return Table(caption, names, rows)


def _bpipe(bpipe: bool) -> str:
    return " with BPipe" if bpipe else ""


def _settings(values: dict[str, Any]) -> Pairs:
    return [(name, str(value)) for name, value in values.items()]


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    parser = add_command(commands, "report")
    parser.add_argument(
        "document",
        type=Path,
        metavar="RUN.json",
        help="what `evenpipe train`, `partition` or `plan --out`, or `simulate` or `demo --json`, has written",
    )
    parser.add_argument("--html", type=output_file, required=True, metavar="OUT.html", help="the page")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document, evenpipe.page/1: where the page is"
    )
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> None:
    path: Path = arguments.document
    title, views = _views(_read(path), path)
    write_page(arguments.html, title, views)
    if arguments.json:
        print(json.dumps({"format": "evenpipe.page/1", "title": title, "path": str(arguments.html)}))


def write_page(path: Path, title: str, views: list[View]) -> None:
    """Put the page at ``path``, whole or not at all; UsageError where that cannot be, or Bokeh is missing."""
    if find_spec("bokeh") is None:
        raise UsageError("Bokeh, which draws the charts, is not installed: pip install 'evenpipe[report]'")
    from evenpipe.report.page.render import page

    write("--html", path, lambda to: write_atomically(to, page(title, views)))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: name what `evenpipe train --out` has written") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is no JSON document: name what `evenpipe train --out` has written") from error
    if not isinstance(document, dict) or not isinstance(document.get("format"), str):
        raise UsageError(f"{path}: is no document of EvenPipe (it has no format): use one of {', '.join(_KINDS)}")
    return document


def _views(document: dict[str, Any], path: Path) -> tuple[str, list[View]]:
    kind = document["format"]
    if kind not in _KINDS:
        raise UsageError(f"{path}: format {kind!r} has no page: use one of {', '.join(_KINDS)}")
    try:
        return _KINDS[kind](document)
    except ValidationError as error:
        said = first_message(error, "the document")
        raise UsageError(f"{path}: {said}: write it anew with this release of EvenPipe") from error
    except ValueError as error:
        raise UsageError(f"{path}: {error}: write it anew with this release of EvenPipe") from error


def demo_views(document: dict[str, Any]) -> tuple[str, list[View]]:
    """Return the title and the parts of the page of what `evenpipe demo --json` prints. Raises ValueError."""
    runs = document.get("runs")
    if not isinstance(runs, dict) or not runs:
        raise ValueError("runs: has no runs")
    views = [_run_view(run)._replace(title=name) for name, run in runs.items()]
    each = {name: RunDocument.model_validate(run) for name, run in runs.items()}
    return "Demo: one GPT on four pipeline stages", [comparison_view(each, document.get("machine")), *views]


def _run_view(document: dict[str, Any]) -> View:
    return run_view(RunDocument.model_validate(document), _able(document))


_KINDS: Final[Mapping[str, Callable[[dict[str, Any]], tuple[str, list[View]]]]] = {
    "evenpipe.run/1": lambda document: ("Run", [_run_view(document)]),
    "evenpipe.demo/1": demo_views,
    "evenpipe.simulation/1": lambda document: (
        "Simulation",
        [simulation_view(SimulationDocument.model_validate(document))],
    ),
    "evenpipe.partition/1": lambda document: ("Partition", [partition_view(document)]),
    "evenpipe.plan/1": lambda document: ("Plan", [plan_view(document)]),
}


def _able(document: dict[str, Any]) -> Callable[[Spec], str | None]:
    """Which engine carries a schedule out, None where the run's own does."""
    settings = document.get("settings")
    present = settings.get("engine") if isinstance(settings, dict) else None

    def engine(spec: Spec) -> str | None:
        own = ENGINES.get(present) if isinstance(present, str) else None
        if own is None or spec.needs <= own.offers:
            return None if present != "megatron" or spec.name in ("1f1b", "interleaved") else "--engine evenpipe"
        able = next((name for name in ("evenpipe", "module") if spec.needs <= ENGINES[name].offers), None)
        return None if able is None else f"--engine {able}"

    return engine
