"""How building, verifying, simulating, planning and partitioning grow: seconds of this process, and fitted exponents.

Schedules: 1F1B with BPipe by micro-batches (8 stages, to m = 16,384) and by stages (m = 2,048, to p = 512; both at
their largest would be 25 million actions), and every other schedule by micro-batches on 16 stages. Each is built (which
proves it), proven again by itself (lowering included), and simulated; n is its actions. Plans: GPT-3 175B on 80 to
10,240 A100s with a batch of as many samples; n is GPUs. Partitions: a chain of nodes with residuals, drawn by chance,
to 100,000 nodes on 8 stages, with and without swap and recomputation; and a plain module, traced and counted, to 10,000
nodes, since torch.export takes milliseconds a node (--traced 100000 takes some six minutes more).

The exponent is that of a power law through the four largest sizes of a row; it is compared with what n log n has
there, and `SLACK` is left for what caches and neighbours on the machine do. Time is the process's own, the least of
the rounds, of which sizes that take long have fewer.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from harness import Benchmark, positive, progress_bar
from matplotlib.figure import Figure
from rich.table import Table
from scale_cases import Case, partitions, plans, schedules, traces

#: By which an exponent may exceed that of n log n.
SLACK: Final = 0.15
#: Sizes through which the power law goes; fewer than three say nothing.
FITTED: Final = 4
FEWEST: Final = 3
#: What all rounds of a size may take.
ALLOWED_S: Final = 70.0


class Growth(NamedTuple):
    """A line's exponent over its largest sizes, and that of n log n there."""

    exponent: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.exponent <= self.allowed + SLACK

    @classmethod
    def of(cls, sizes: Sequence[int], seconds: Sequence[float]) -> Growth:
        """From sizes in ascending order."""
        n, took = (np.array(values[-FITTED:], float) for values in (sizes, seconds))
        return cls(slope(n, took), slope(n, n * np.log(n)))


def slope(n: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> float:
    """The exponent of a power law through the values."""
    return float(np.polyfit(np.log(n), np.log(values), 1)[0])


@dataclass
class Taken:
    """What the steps of a case have taken at the least, and all of it together so far."""

    seconds: dict[str, float] = field(default_factory=dict)
    size: int = 0
    in_all: float = 0.0
    peak_gib: float = 0.0

    def measure(self, case: Case) -> None:
        """Once more."""
        steps = case.steps()
        while True:
            began = time.process_time()
            done = next(steps, None)
            took = time.process_time() - began
            self.in_all += took
            if done is None:
                break
            if done.name:
                self.seconds[done.name] = min(took, self.seconds.get(done.name, math.inf))
            self.size = done.size or self.size
        self.peak_gib = peak_gib()


def measured(cases: Sequence[Case], repeats: int) -> list[dict[str, Any]]:
    """Each case's steps, measured in rounds, so that all sizes see the same neighbours."""
    taken = [Taken() for _ in cases]
    with progress_bar("sizes", repeats * len(cases)) as tick:
        for number in range(repeats):
            for case, so_far in zip(cases, taken, strict=True):
                if so_far.in_all / max(1, number) * (number + 1) <= ALLOWED_S:
                    so_far.measure(case)
                tick()
    return [
        {
            "what": name,
            "of": case.of,
            "at": case.at,
            "unit": case.unit,
            "n": one.size,
            "seconds": seconds,
            "peak_gib": one.peak_gib,
        }
        for case, one in zip(cases, taken, strict=True)
        for name, seconds in one.seconds.items()
    ]


def peak_gib() -> float:
    """What this process has held at most so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def lines(results: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The measurements by what grows, in ascending order of size."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in results:
        found.setdefault((one["what"], one["of"]), []).append(one)
    return {key: sorted(points, key=lambda one: one["n"]) for key, points in found.items()}


def growths(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each line's exponent and verdict; of lines with too few sizes none."""
    found = []
    for (what, of), points in lines(results).items():
        if len(points) < FEWEST:
            continue
        grown = Growth.of([one["n"] for one in points], [one["seconds"] for one in points])
        about = {"what": what, "of": of, "exponent": grown.exponent, "n_log_n": grown.allowed, "holds": grown.holds}
        found.append({**about, "largest": points[-1]["at"], "unit": points[-1]["unit"]})
    return found


def table(results: Sequence[dict[str, Any]]) -> Table:
    """Every line at its largest, its exponent, and whether it holds."""
    grown = growths(results)
    bad = [f"{one['what']} {one['of']}" for one in grown if not one["holds"]]
    bound = f"at most {SLACK} above"
    allowed = f"n log n and {SLACK} in the exponent"
    verdict = f"worse than {allowed}: {', '.join(bad)}" if bad else f"nothing grows worse than {allowed}"
    columns = ("what", "of", "from", "to", "n", "CPU s", "µs a unit", "unit", "exponent", "of n log n", bound)
    shown = Table(*columns, caption=verdict)
    exponents = {(one["what"], one["of"]): one for one in grown}
    for key, points in lines(results).items():
        first, last = points[0], points[-1]
        cells = [*key, first["at"], last["at"], f"{last['n']:,}", f"{last['seconds']:.2f}"]
        cells += [f"{1e6 * last['seconds'] / last['n']:,.1f}", last["unit"]]
        one = exponents.get(key)
        said = ("–",) * 3
        if one is not None:
            above = one["exponent"] - one["n_log_n"]
            met = "WORSE" if not one["holds"] else f"holds: {above:.3f} above" if above > 0 else "holds"
            said = f"{one['exponent']:.2f}", f"{one['n_log_n']:.2f}", met
        shown.add_row(*cells, *said)
    return shown


def draw(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Write a PNG, log-log: a panel for each of what is done to actions, GPUs and nodes, and n log n beside."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for one in results:
        panels.setdefault(one["what"] if one["unit"] == "action" else one["unit"] + "s", []).append(one)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.3 * columns, 3.4 * rows), layout="constrained")
    free = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, (title, of_panel) in zip(free, panels.items(), strict=False):
        of_actions = of_panel[0]["unit"] == "action"
        for (what, of), points in lines(of_panel).items():
            x, y = ([one[key] for one in points] for key in ("n", "seconds"))
            label = of if what == title else f"{what}, {of}"
            axes.plot(x, y, marker="o", ms=3, lw=1, label=label)
        ends = np.array([min(one["n"] for one in of_panel), max(one["n"] for one in of_panel)], float)
        top = max(one["seconds"] for one in of_panel)
        axes.plot(ends, 2 * top * ends * np.log(ends) / (ends[1] * np.log(ends[1])), "k--", lw=1, label="∝ n log n")
        axes.set(xscale="log", yscale="log")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(f"{of_panel[0]['unit']}s", fontsize=9)
        axes.set_ylabel("seconds of CPU", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        if not of_actions:
            low, high = axes.get_ylim()
            axes.set_ylim(low, high * 30)
            axes.legend(frameon=False, fontsize=8, loc="upper left")
    for axes in free[len(panels) :]:
        axes.set_axis_off()
    by_action = [axes for axes, of in zip(free, panels.values(), strict=False) if of[0]["unit"] == "action"]
    if by_action:  # what is done to schedules has the same lines in all panels
        handles, labels = by_action[0].get_legend_handles_labels()
        beside = free[len(panels)] if len(free) > len(panels) else by_action[0]
        beside.legend(handles, labels, frameon=False, fontsize=9, loc="center left", title="of schedules")
    figure.savefig(path, dpi=130)


def main() -> None:
    benchmark = Benchmark("scale", __doc__ or "", repeats=2)
    add = benchmark.parser.add_argument
    add("--micro-batches", type=positive, default=16384, help="the most on 8 stages (default 16384)")
    add("--stages", type=positive, default=512, help="the most with 2,048 micro-batches (default 512)")
    add("--gpus", type=positive, default=10240, help="the most that are planned for (default 10240)")
    add("--nodes", type=positive, default=100_000, help="the most that are cut into stages (default 100000)")
    add("--traced", type=positive, default=10_000, help="the most that are traced and counted (default 10000)")
    add("--picture", type=Path, metavar="P.png", help="all of it, log-log")
    arguments = benchmark.parser.parse_args()
    made: list[Callable[[], Iterator[Case]]] = [
        lambda: schedules(arguments.micro_batches, arguments.stages),
        lambda: plans(arguments.gpus),
        lambda: partitions(arguments.nodes),
        lambda: traces(arguments.traced),
    ]
    cases = [case for make in made for case in make()]
    results = measured(cases, arguments.repeats)
    if arguments.picture is not None:
        draw(arguments.picture, results)
    settings = {"slack": SLACK, "fitted": FITTED, "growth": growths(results)}
    settings |= {name: getattr(arguments, name) for name in ("micro_batches", "stages", "gpus", "nodes", "traced")}
    benchmark.report(settings, results, table(results))


if __name__ == "__main__":
    main()
