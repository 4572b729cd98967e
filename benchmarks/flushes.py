"""What benchmarks of pipelines with and without flushes share: settings, theory, the document's entries, the table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from harness import Benchmark, positive
from rich.table import Table

from evenpipe.schedule import Size, build
from evenpipe.schedule.known import find, names
from evenpipe.simulate import Costs, simulate

__all__ = ["Setting", "add_flags", "common", "result", "settings_of", "table"]


class Setting(NamedTuple):
    """One pipeline; a backward takes twice a forward. `batches` are measured in every round, after `warm_up` others."""

    stages: int
    micro_batches: int
    forward_ms: float
    repeats: int
    warm_up: int
    batches: int

    def theory_ms(self, variant: str) -> float:
        """A batch, where messages, host and optimizer take no time."""
        if variant in names() and "vee" in find(variant).needs:
            program = build(variant, Size(self.stages, self.micro_batches, 2))
            costs = Costs((self.forward_ms,) * self.stages, (2 * self.forward_ms,) * self.stages)
            return simulate(program, costs).makespan_ms
        # Of ZB-H1's bubble, see arXiv 2401.10241, Table 2, with halves that take as long as a forward.
        waiting = {"2bw": 0, "zb-h1": 1}.get(variant, 3) * (self.stages - 1)
        return (3 * self.micro_batches + waiting) * self.forward_ms


def add_flags(benchmark: Benchmark, cases: Sequence[str]) -> None:
    """The flags of a setting; `cases` are measured where none are given."""
    add, default = benchmark.parser.add_argument, [_case(text) for text in cases]
    add("--cases", type=_case, nargs="+", default=default, metavar="PxM", help=f"(default {' '.join(cases)})")
    add("--forward-ms", type=float, default=100.0, help="a backward takes twice as long (default 100)")
    add("--warm-up", type=positive, default=2, help="batches of a round that are not measured (default 2)")
    add("--batches", type=positive, default=3, help="measured batches of a round (default 3)")


def settings_of(arguments: argparse.Namespace) -> list[Setting]:
    """One pipeline for each value of --cases."""
    given = (arguments.forward_ms, arguments.repeats, arguments.warm_up, arguments.batches)
    return [Setting(stages, micro_batches, *given) for stages, micro_batches in arguments.cases]


def common(arguments: argparse.Namespace) -> dict[str, Any]:
    """What all cases have in common, for the document."""
    given = {name: getattr(arguments, name) for name in ("forward_ms", "repeats", "warm_up", "batches")}
    return given | {"backward_ms": 2 * arguments.forward_ms}


def result(setting: Setting, times: dict[str, list[float]], **about: Any) -> dict[str, Any]:
    """One entry of the document: medians, theory, and every round. Speed-ups are over the first variant."""
    measured = {name: median(rounds) for name, rounds in times.items()}
    theory = {name: setting.theory_ms(name) for name in times}
    entry: dict[str, Any] = {"stages": setting.stages, "micro_batches": setting.micro_batches, **about}
    for name in times:
        entry |= {f"{name}_ms": measured[name], f"theory_{name}_ms": theory[name]}
        entry[f"{name}_ratio"] = measured[name] / theory[name]
    stock, *ours = times
    for prefix, values in (("", measured), ("theory_", theory)):
        entry |= {f"{prefix}{name}_speed_up": values[stock] / values[name] for name in ours}
    return entry | {"rounds_ms": times}


def table(results: list[dict[str, Any]], **about: str) -> Table:
    """The same for people; `about` are further columns of the pipeline, by their keys."""
    columns = {"stages": "stages", "micro_batches": "m", **about}
    shown = Table(*columns.values(), "schedule", "ms", "theory", "× theory", "speed-up", "theory")
    for entry in results:
        pipeline = [str(entry[key]) for key in columns]
        for name in entry["rounds_ms"]:
            times = [f"{entry[f'{prefix}{name}_ms']:,.0f}" for prefix in ("", "theory_")]
            gains = [f"{entry.get(f'{prefix}{name}_speed_up', 1):.3f}" for prefix in ("", "theory_")]
            shown.add_row(*pipeline, name, *times, f"{entry[f'{name}_ratio']:.3f}", *gains)
            pipeline = [""] * len(columns)
        shown.add_section()
    return shown


def _case(text: str) -> tuple[int, int]:
    """The value of --cases: stages x micro-batches."""
    stages, _, micro_batches = text.partition("x")
    return positive(stages), positive(micro_batches)
