"""Training speed at equal batch, ours over vPipe's: DawnPiper's §5.3, on emulated devices.

Both cut the same profiles of the four models (fp32, sequence length 512, roofline of an A100 of 40 GB on PCIe 4 ×16)
and swap and recompute to fit into its memory. Every stage is a process: nodes sleep as long as the profile says, copies
to the host as long as its link takes, and what is kept, computed again, swapped, sent and scheduled goes through the
runtime that trains real models. Milliseconds are stretched, alike for both, so that the host keeps up; bytes are there
to 1/4096. Neighbours exchange 4 KiB: emulated messages cost next to nothing on either side.

Batches, as the paper's figures 6 and 7 have them (§5.3: the same batch size for both; "as the batch size increases,
other methods must implement memory optimization"): from the largest that vPipe trains without memory optimisation, in
even steps, to as many times that as vPipe gets with it in the paper's Tables 1 and 2, or to what it gets here, if that
is less. `async` is PipeDream's schedule, from one micro-batch to the next; `sync` GPipe's, a whole batch of as many
micro-batches as stages. What is simulated beside has each plan's own times. `at most`: vPipe's time over that of
stages that are perfectly even and save memory for nothing, which no plan can exceed. With `--simulated`, messages of
both take the time of links between stages (25 GB/s, the paper's PCIe 4 ×16), and ours are planned for these.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from emulated_plan import Batch, Case, case_of, measure, period_ms, simulated
from harness import Benchmark, positive, progress_bar, run_in_processes
from rich.console import Group
from rich.table import Table
from rivals.layers import Layers
from rivals.profiles import DEVICE, LIMIT_BYTES, MODELS, problem_of, profiles_of
from rivals.vpipe import Division, vpipe

from evenpipe.partition.dawnpiper.capuchin import Optimize
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.profile import Profile
from evenpipe.partition.search.batch_clock import BatchClock, StageLinks
from evenpipe.partition.search.finding import find_plan, largest_batch
from evenpipe.partition.search.plan import Plan, plan_of

#: vPipe's largest batch with memory optimisation over that without (Tables 1 and 2), by mode, stages and model.
PAPER_REACH: Final = {
    ("async", 4): {"BERT": 46 / 16, "GPT-2": 8 / 2, "T5": 110 / 40, "AmoebaNet": 300 / 48},
    ("async", 8): {"GPT-2": 16 / 2, "T5": 144 / 44},
    ("sync", 4): {"BERT": 128 / 60, "GPT-2": 28 / 8, "T5": 348 / 144, "AmoebaNet": 720 / 188},
    ("sync", 8): {"GPT-2": 56 / 16, "T5": 664 / 256},
}
#: §5.3: the mean over batches where there is one, else the best, with its model.
PAPER_MEANS: Final = {
    ("async", 4): {"BERT": 1.2, "GPT-2": 1.12, "T5": 1.32, "AmoebaNet": 1.24},
    ("async", 8): {"GPT-2": 1.15, "T5": 1.34},
}
PAPER_BEST: Final = {("sync", 4): {"T5": 1.5}}
#: What is chosen of a plan is called node by node; at less than this for each the host could not keep up.
_LEAST_NODE_MS: Final = 0.5
#: Of a message between two GPUs of a node.
LATENCY_MS: Final = 0.025


class Pair(NamedTuple):
    """Both plans for one batch, and how much longer everything takes when they are emulated."""

    title: str
    mode: str
    stages: int
    micro_batch_size: int
    profile: Profile
    plans: dict[str, Plan]
    time: float


def vpipes(profile: Profile, mode: str, stages: int, optimize: Optimize) -> Division | None:
    """What vPipe settles on."""
    return vpipe(Layers(profile), problem_of(profile, mode, stages, optimize), optimize != "none")


def batches(title: str, mode: str, stages: int, points: int) -> list[int]:
    """The micro-batch sizes to compare at; see this module."""
    at = profiles_of(title)

    def largest(optimize: Optimize) -> int:
        return largest_batch(at, lambda profile: vpipes(profile, mode, stages, optimize) is not None)

    least = largest("none")
    most = min(round(least * PAPER_REACH[mode, stages][title]), largest("swap+recompute"))
    return sorted({round(least + (most - least) * point / max(1, points - 1)) for point in range(points)})


def pair_of(title: str, mode: str, stages: int, size: int, period: float, links: StageLinks | None) -> Pair:
    """Both plans for micro-batches of this size; `period`: at least what the slower one's longest stage shall take."""
    profile, workload = profiles_of(title)(size), Workload.of_mode(mode, stages)
    problem = problem_of(profile, mode, stages, "swap+recompute")
    division, layers = vpipes(profile, mode, stages, "swap+recompute"), Layers(profile)
    assert division is not None, "it is among the sizes that vPipe trains"
    cuts = [layers.boundaries[boundary] for boundary in division.boundaries]
    rival = plan_of(problem, cuts, [stage.fit for stage in division.stages], workload)
    if links is not None:
        clock = BatchClock(problem, workload, links)
        rival = rival.model_copy(update={"crossings": clock.crossings(cuts)})
    ours = find_plan(profile, workload, stages, LIMIT_BYTES, "swap+recompute", DEVICE.host_gbps, links=links)
    plans = {"vpipe": rival, "evenpipe": ours}
    chosen = max(sum(len(p.recompute) + 2 * len(p.swap_storages) for p in plan.stages) for plan in plans.values())
    longest_ms = max(period, _LEAST_NODE_MS * chosen)
    return Pair(
        title, mode, stages, size, profile, plans, longest_ms / max(plan.max_stage_ms for plan in plans.values())
    )


def cases_of(pair: Pair) -> dict[str, Case]:
    """Both as they are emulated."""
    return {name: case_of(pair.profile, plan, pair.time, 2 * pair.stages + 4) for name, plan in pair.plans.items()}


def taken_ms(pair: Pair, batch: Batch) -> float:
    """Of a micro-batch, or of a batch of GPipe's."""
    return (period_ms(batch.ends_ms) if pair.mode == "async" else batch.ms) / pair.time


def predicted_ms(pair: Pair, plan: Plan, case: Case) -> float:
    """The same as the plan's own times have it."""
    found = simulated(plan, case, pair.time)
    ends = [[span.end_ms for span in row if span.action.kind == "B"] for row in found.timeline]
    return (period_ms(ends) if pair.mode == "async" else found.makespan_ms) / pair.time


def even_ms(pair: Pair) -> float:
    """Of a micro-batch, or of a batch of GPipe's, where all stages take equally long, and saving memory nothing."""
    whole = sum(node.forward_ms + node.backward_ms for node in pair.profile.nodes)
    return whole / pair.stages * (1 if pair.mode == "async" else 2 * pair.stages - 1)


def result(pair: Pair, measured: dict[str, list[Batch]] | None) -> dict[str, Any]:
    """A row: milliseconds by the profile's clock, and ours over vPipe's in speed."""
    cases = cases_of(pair)
    planned = {name: predicted_ms(pair, plan, cases[name]) for name, plan in pair.plans.items()}
    row: dict[str, Any] = {
        "model": pair.title,
        "mode": pair.mode,
        "stages": pair.stages,
        "micro_batch_size": pair.micro_batch_size,
        "time_scale": pair.time,
        "simulated_ms": planned,
        "simulated_ratio": planned["vpipe"] / planned["evenpipe"],
        "at_most": planned["vpipe"] / even_ms(pair),
    }
    if measured is not None:
        every = {name: [taken_ms(pair, one) for one in found] for name, found in measured.items()}
        medians = {name: median(values) for name, values in every.items()}
        fastest = min(every["vpipe"]) / min(every["evenpipe"])
        row |= {"ms": medians, "ratio": medians["vpipe"] / medians["evenpipe"], "fastest_ratio": fastest}
        row["batches_ms"] = every
    return row


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By mode and number of stages: the mean of each model, the mean of these, and the best of all."""
    found = []
    for mode, stages in sorted({(row["mode"], row["stages"]) for row in rows}):
        mine = [row for row in rows if (row["mode"], row["stages"]) == (mode, stages)]
        means = {
            title: fmean(row.get("ratio", row["simulated_ratio"]) for row in mine if row["model"] == title)
            for title in dict.fromkeys(row["model"] for row in mine)
        }
        best = max(mine, key=lambda row: row.get("ratio", row["simulated_ratio"]))
        found.append(
            {
                "mode": mode,
                "stages": stages,
                "mean_by_model": means,
                "paper_mean_by_model": PAPER_MEANS.get((mode, stages)),
                "mean": fmean(means.values()),
                "mean_at_most": fmean(
                    fmean(row["at_most"] for row in mine if row["model"] == title) for title in means
                ),
                "best_at_most": max(row["at_most"] for row in mine),
                "best": best.get("ratio", best["simulated_ratio"]),
                "best_model": best["model"],
                "paper_best": PAPER_BEST.get((mode, stages)),
            }
        )
    return found


def pairs(arguments: Any) -> Iterator[Pair]:
    """All that is compared, one after the other."""
    links = StageLinks(arguments.stage_gbps, LATENCY_MS) if arguments.simulated else None
    for mode in arguments.modes:
        for stages in arguments.stages:
            for title in PAPER_REACH[mode, stages]:
                if title in arguments.models:
                    for size in batches(title, mode, stages, arguments.points):
                        yield pair_of(title, mode, stages, size, arguments.period_ms, links)


def main() -> None:
    benchmark = Benchmark("partition_speed", __doc__ or "", repeats=5)
    add = benchmark.parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    add("--modes", nargs="+", choices=("async", "sync"), default=["async", "sync"], help="(default: both)")
    add("--stages", nargs="+", type=int, choices=(4, 8), default=[4, 8], help="(default 4 8)")
    add("--points", type=positive, default=3, help="batch sizes for each model (default 3)")
    add("--period-ms", type=float, default=100.0, help="that the longest stage takes at least (default 100)")
    add("--simulated", action="store_true", help="emulate nothing; messages take time")
    add("--stage-gbps", type=float, default=25.0, help="with --simulated: of links between stages (default 25)")
    arguments = benchmark.parser.parse_args()
    rows = []
    for pair in pairs(arguments):
        what = f"{pair.title}, {pair.stages} stages, {pair.mode}, {pair.micro_batch_size}"
        measured = None
        if not arguments.simulated:
            with progress_bar(what, 2 * (arguments.repeats + 1)) as tick:
                measured = run_in_processes(pair.stages, measure, cases_of(pair), arguments.repeats, tick=tick)
        rows.append(result(pair, measured))
    settings = {"repeats": arguments.repeats, "limit_bytes": LIMIT_BYTES, "device": DEVICE.name}
    settings |= {"stage_gbps": arguments.stage_gbps} if arguments.simulated else {}
    found = summary(rows)
    benchmark.report(settings, [*rows, *found], Group(table(rows), summary_table(found)))


def table(rows: list[dict[str, Any]]) -> Table:
    """The same for people."""
    shown = Table("", "batch", "vPipe ms", "ours ms", "ratio", "of the fastest", "simulated", "at most", "time ×")
    for row in rows:
        ms = row.get("ms", row["simulated_ms"])
        shown.add_row(
            f"{row['mode']} {row['stages']} {row['model']}",
            str(row["micro_batch_size"]),
            f"{ms['vpipe']:,.1f}",
            f"{ms['evenpipe']:,.1f}",
            f"{row['ratio']:.3f}" if "ratio" in row else "–",
            f"{row['fastest_ratio']:.3f}" if "ratio" in row else "–",
            f"{row['simulated_ratio']:.3f}",
            f"{row['at_most']:.3f}",
            f"{row['time_scale']:.2f}",
        )
    return shown


def summary_table(found: list[dict[str, Any]]) -> Table:
    """The same of what `summary` gives, with the paper's."""
    shown = Table("mode", "stages", "mean by model (paper's)", "mean", "best (paper's)", "at most: mean, best")
    for one in found:
        paper, best = one["paper_mean_by_model"] or {}, one["paper_best"] or {}
        means = (
            f"{title} {mean:.2f}" + (f" ({paper[title]:g})" if title in paper else "")
            for title, mean in one["mean_by_model"].items()
        )
        said = "".join(f" ({title} {value:g})" for title, value in best.items())
        shown.add_row(
            one["mode"],
            str(one["stages"]),
            ", ".join(means),
            f"{one['mean']:.3f}",
            f"{one['best_model']} {one['best']:.2f}{said}",
            f"{one['mean_at_most']:.3f}, {one['best_at_most']:.2f}",
        )
    return shown


if __name__ == "__main__":
    main()
