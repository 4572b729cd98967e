"""``evenpipe report``: one HTML page of a run, a simulation, a partition or a plan."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from evenpipe.cli.commands import add_command
from evenpipe.cli.options import write
from evenpipe.cli.parser import Commands, UsageError
from evenpipe.cli.values import output_file
from evenpipe.report.files import write_atomically
from evenpipe.report.page.comparison import comparison_view
from evenpipe.report.page.content import View
from evenpipe.report.page.documents import RunDocument, SimulationDocument
from evenpipe.report.page.views import run_view, simulation_view
from evenpipe.schedule import Spec
from evenpipe.train.engines import ENGINES

__all__ = ["add_to", "demo_views", "write_page"]


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
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> None:
    path: Path = arguments.document
    title, views = _views(_read(path), path)
    write_page(arguments.html, title, views)


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
        raise UsageError(f"{path}: is no document of EvenPipe (it has no format): use one of {_known()}")
    return document


def _views(document: dict[str, Any], path: Path) -> tuple[str, list[View]]:
    kind = document["format"]
    if kind not in _KINDS:
        raise UsageError(f"{path}: format {kind!r} has no page: use one of {_known()}")
    try:
        return _KINDS[kind](document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        said = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{path}: {where}: {said}: write it anew with this release of EvenPipe") from error
    except ValueError as error:
        raise UsageError(f"{path}: {error}: write it anew with this release of EvenPipe") from error


def _of_run(document: dict[str, Any]) -> tuple[str, list[View]]:
    return "Run", [run_view(RunDocument.model_validate(document), _able(document))]


def demo_views(document: dict[str, Any]) -> tuple[str, list[View]]:
    """The title and the parts of the page of what `evenpipe demo --json` prints. Raises ValueError."""
    runs = document.get("runs")
    if not isinstance(runs, dict) or not runs:
        raise ValueError("runs: has no runs")
    views = [_of_run(run)[1][0]._replace(title=name) for name, run in runs.items()]
    each = {name: RunDocument.model_validate(run) for name, run in runs.items()}
    return "Demo: one GPT on four pipeline stages", [comparison_view(each, document.get("machine")), *views]


def _of_simulation(document: dict[str, Any]) -> tuple[str, list[View]]:
    return "Simulation", [simulation_view(SimulationDocument.model_validate(document))]


def _of_partition(document: dict[str, Any]) -> tuple[str, list[View]]:
    from evenpipe.cli.report_planned import partition_view

    return "Partition", [partition_view(document)]


def _of_plan(document: dict[str, Any]) -> tuple[str, list[View]]:
    from evenpipe.cli.report_planned import plan_view

    return "Plan", [plan_view(document)]


_KINDS: Final[Mapping[str, Callable[[dict[str, Any]], tuple[str, list[View]]]]] = {
    "evenpipe.run/1": _of_run,
    "evenpipe.demo/1": demo_views,
    "evenpipe.simulation/1": _of_simulation,
    "evenpipe.partition/1": _of_partition,
    "evenpipe.plan/1": _of_plan,
}


def _known() -> str:
    return ", ".join(_KINDS)


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
