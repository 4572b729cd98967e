"""``evenpipe demo``: one GPT under Megatron's 1F1B, EvenPipe's 1F1B and BPipe, side by side."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from evenpipe.cli.parser import Commands, add_command
from evenpipe.cli.report import demo_views, write_page
from evenpipe.cli.shown import console_of, print_table
from evenpipe.cli.training import run_training
from evenpipe.cli.values import output_file, picture_file
from evenpipe.report.page.content import RunDocument
from evenpipe.report.page.views import DIFFERENT, SAME, busy, compared
from evenpipe.report.timeline import StageMemory, Timeline
from evenpipe.simulate import Simulation
from evenpipe.train.options import TrainOptions
from evenpipe.train.predict import predict, run_document
from evenpipe.train.result import RunResult

__all__ = ["add_to"]

_MIB = 2**20
_MODEL: dict[str, Any] = {
    "layers": 8,
    "hidden": 128,
    "heads": 4,
    "seq_length": 128,
    "micro_batch_size": 4,
    "stages": 4,
    "micro_batches": 8,
    "iterations": 10,
}
_CASES: dict[str, dict[str, Any]] = {
    "Megatron's 1F1B": {"engine": "megatron"},
    "EvenPipe's 1F1B": {"engine": "evenpipe"},
    "with BPipe": {"engine": "evenpipe", "bpipe": True},
}
_COLOURED = {SAME: Text(SAME, "green"), DIFFERENT: Text(DIFFERENT, "red")}


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    parser = add_command(commands, "demo")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument(
        "--picture", type=picture_file, default=Path("demo.png"), metavar="P.png", help="default: demo.png"
    )
    parser.add_argument(
        "--html",
        type=output_file,
        default=Path("demo.html") if find_spec("bokeh") is not None else None,
        metavar="OUT.html",
        help="the same as a page to look into; default: demo.html, where evenpipe[report] is installed",
    )
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> None:
    machine = _machine()
    for line in busy(machine):
        print(f"evenpipe demo: {line}", file=sys.stderr)
    cases = [TrainOptions.of(**_MODEL, **case) for case in _CASES.values()]
    results = run_training("demo", cases, list(_CASES))
    predictions = [predict(options.program, result) for options, result in zip(cases, results, strict=True)]
    _draw(arguments.picture, results, predictions)
    runs = {
        name: run_document(name, options, options.program, result, prediction)
        for name, options, result, prediction in zip(_CASES, cases, results, predictions, strict=True)
    }
    document = {"format": "evenpipe.demo/1", "machine": machine, "runs": runs, "picture": str(arguments.picture)}
    if arguments.html is not None:
        write_page(arguments.html, *demo_views(document))
    if arguments.json:
        print(json.dumps(document | {"page": None if arguments.html is None else str(arguments.html)}))
    else:
        console = console_of()
        _print(console, runs)
        page = "" if arguments.html is None else f", and to look into: {arguments.html}"
        console.print(f"timelines and memory: {arguments.picture}{page}")
    if len({(result.losses, result.weights_sha256) for result in results}) > 1:
        raise SystemExit("evenpipe demo: losses or weights differ: please report this, with the output above")


def _draw(path: Path, results: Sequence[RunResult], predictions: Sequence[Simulation]) -> None:
    """The measured timelines, and per stage the predicted next to the measured peak."""
    from evenpipe.report.picture import draw_comparison

    timelines, memory = [], []
    for name, result, prediction in zip(_CASES, results, predictions, strict=True):
        timelines.append(Timeline(name, result.spans))
        predicted = tuple(stage.peak_bytes / _MIB for stage in prediction.stages)
        measured = tuple(stage.peak_saved_bytes / _MIB for stage in result.stages)
        memory.append(StageMemory(f"{name}: peak saved", "MiB", predicted, measured))
    draw_comparison(path, timelines, memory)


def _machine() -> dict[str, Any]:
    """Return how many processes wanted to run in the last minute, and on how many cores."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return {"load_before": os.getloadavg()[0], "cores": cores}


def _print(console: Console, runs: Mapping[str, dict[str, Any]]) -> None:
    """As the page has it."""
    found = compared({name: RunDocument.model_validate(run) for name, run in runs.items()})
    rows = [[_COLOURED.get(cell, cell) for cell in row] for row in found.rows]
    print_table(console, found.columns, rows, found.caption)
