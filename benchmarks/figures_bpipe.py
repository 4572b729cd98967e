"""What BPipe's transfers cost an iteration, as its Figure 9 draws it: by simulation, with the times of its Table 4.

Simulated: 1F1B on eight stages, m = 32 to 1,024 micro-batches, without BPipe, with it ("asynchronous"), and with
evictors that wait for each eviction and load before they go on ("synchronous"). Times of GPT-3 13B on A100s, of a
micro-batch of one sample: forward, backward and transfer as the paper measured them (Table 4, line 282); links between
neighbours are free, since it does not say what they take. Figure 9 is without recomputation; the table's other two
scopes are shown too. In its text the paper has 1.011 at any m that is large (line 262), and 1.11 where transfers are
synchronous (line 264); how its synchronous variant waits it does not say.

The same on real processes with emulated stages:
bpipe_overlap.py --stages 8 --micro-batches 32 --forward-ms 36.32 --backward-ms 74.12 --transfer-ms 22.48
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from harness import Benchmark, positive, progress_bar
from matplotlib.figure import Figure
from rich.table import Table

from evenpipe.schedule import LinkKind, Size, build
from evenpipe.simulate import Costs, Wire, simulate

STAGES: Final = 8
MICRO_BATCHES: Final = (32, 64, 128, 256, 512, 1024)
#: As the text of §4.4 has them, lines 262 and 264.
PAPER: Final = {"asynchronous": 1.011, "synchronous": 1.11}
COLOURS: Final = {"asynchronous": "#4477aa", "synchronous": "#cc6677"}


class Times(NamedTuple):
    """Of a micro-batch, in milliseconds; a transfer is an eviction or a load."""

    transfer_ms: float
    forward_ms: float
    backward_ms: float


#: Table 4, lines 285 to 287, by what is recomputed.
TABLE_4: Final = {
    "none": Times(22.48, 36.32, 74.12),
    "attention": Times(7.63, 36.32, 83.57),
    "layer": Times(0.58, 36.32, 110.33),
}


def entry(recompute: str, micro_batches: int) -> dict[str, Any]:
    """One line of the table: milliseconds of an iteration, and over that without BPipe."""
    times, size = TABLE_4[recompute], Size(STAGES, micro_batches)
    wire = Wire(transmit_ms=times.transfer_ms)
    wires: dict[LinkKind, Wire] = {"evict": wire, "load": wire}

    def iteration_ms(bpipe: bool, waits: bool) -> float:
        costs = Costs((times.forward_ms,) * STAGES, (times.backward_ms,) * STAGES, wires, synchronous_transfers=waits)
        return simulate(build("1f1b", size, bpipe=bpipe), costs).makespan_ms

    none_ms = iteration_ms(False, False)
    found: dict[str, Any] = {"recompute": recompute, "micro_batches": micro_batches, "none_ms": none_ms}
    for mode in PAPER:
        found[f"{mode}_ms"] = iteration_ms(True, mode == "synchronous")
        found[f"{mode}_ratio"] = found[f"{mode}_ms"] / none_ms
    return found


def table(results: Sequence[dict[str, Any]]) -> Table:
    """The same for people."""
    shown = Table("recomputed", "m", "no BPipe, ms", "asynchronous", "paper", "synchronous", "paper")
    for one in results:
        of_figure = one["recompute"] == "none"
        ratios = [cell for mode in PAPER for cell in (f"{one[f'{mode}_ratio']:.3f}", f"{PAPER[mode]}" * of_figure)]
        shown.add_row(one["recompute"], str(one["micro_batches"]), f"{one['none_ms']:,.0f}", *ratios)
    return shown


def draw(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Write a PNG like Figure 9: what BPipe adds to an iteration, in percent, by m."""
    of_figure = [one for one in results if one["recompute"] == "none"]
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for mode, colour in COLOURS.items():
        sizes = [one["micro_batches"] for one in of_figure]
        added = [100 * (one[f"{mode}_ratio"] - 1) for one in of_figure]
        axes.plot(sizes, added, color=colour, marker="o", label=f"{mode}, simulated")
        axes.axhline(100 * (PAPER[mode] - 1), color=colour, ls="--", label=f"{mode}, the paper's text")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_ylim(bottom=-1)
    axes.set_xlabel("micro-batches of an iteration")
    axes.set_ylabel("% longer than without BPipe")
    axes.set_title("BPipe, Figure 9: GPT-3 13B on 8 stages, nothing recomputed", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="center right", bbox_to_anchor=(1, 0.24))
    figure.savefig(path, dpi=100)


def main() -> None:
    benchmark = Benchmark("figures_bpipe", __doc__ or "", repeats=1)
    add = benchmark.parser.add_argument
    add("--micro-batches", type=positive, nargs="+", default=list(MICRO_BATCHES), help="(default 32 to 1024)")
    add("--picture", type=Path, metavar="P.png", help="Figure 9")
    arguments = benchmark.parser.parse_args()
    cases = [(recompute, size) for recompute in TABLE_4 for size in arguments.micro_batches]
    results = []
    with progress_bar("pipelines", len(cases)) as tick:
        for case in cases:
            results.append(entry(*case))
            tick()
    if arguments.picture is not None:
        draw(arguments.picture, results)
    settings = {"stages": STAGES, "simulated": True, "paper": PAPER}
    settings |= {"table_4": {name: times._asdict() for name, times in TABLE_4.items()}}
    benchmark.report(settings, results, table(results))


if __name__ == "__main__":
    main()
