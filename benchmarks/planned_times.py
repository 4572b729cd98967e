"""Whether stages take what their plan says, and what a swap costs that the plan calls overlapped, on emulated devices.

Every stage is a process: nodes sleep as long as the profile says (roofline of an A100 of 40 GB on PCIe 4 ×16, fp32),
copies to the host as long as its link takes, and what is kept, computed again, swapped, sent and scheduled goes through
the runtime that trains real models. Milliseconds are stretched; bytes are there to 1/4096. Plans are found for the
schedule that runs. Those that only swap, at no cost by the plan, run beside the same cuts without any swap, in turn.
"""

from __future__ import annotations

from statistics import median
from typing import Any, Final, NamedTuple

from emulated_plan import Batch, Case, case_of, measure, simulated
from harness import Benchmark, progress_bar, run_in_processes
from rich.table import Table
from rivals.profiles import DEVICE, LIMIT_BYTES, MODELS, profiles_of

from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.search.finding import find_plan
from evenpipe.partition.search.plan import Plan

STAGES: Final = 4


class Setting(NamedTuple):
    """A model on four stages."""

    title: str
    schedule: str
    micro_batches: int
    micro_batch_size: int
    optimize: Any = "swap+recompute"


#: The first of a schedule only swaps.
SETTINGS: Final = (
    Setting("GPT-2", "gpipe", 4, 9),
    Setting("GPT-2", "gpipe", 4, 14),
    Setting("BERT", "1f1b", 12, 26),
    Setting("BERT", "1f1b", 12, 48),
)


def plan_of(setting: Setting, limit_bytes: float) -> Plan:
    """For the schedule that runs."""
    workload = Workload(setting.schedule, setting.micro_batches)
    profile = profiles_of(setting.title)(setting.micro_batch_size)
    return find_plan(profile, workload, STAGES, int(limit_bytes), setting.optimize, DEVICE.host_gbps)


def without_swaps(plan: Plan) -> Plan:
    """The same cuts, with all kept."""
    none: dict[str, Any] = dict.fromkeys(("recompute", "swap", "drop", "swap_storages", "drop_storages"), ())
    return plan.model_copy(update={"stages": tuple(part.model_copy(update=none) for part in plan.stages)})


def cases_of(setting: Setting, plan: Plan, time: float) -> dict[str, Case]:
    """The plan, and where it only swaps, and for nothing, its cuts alone."""
    profile = profiles_of(setting.title)(setting.micro_batch_size)
    cases = {"planned": case_of(profile, plan, time, setting.micro_batches)}
    if is_overlapped(plan):
        cases["without"] = case_of(profile, without_swaps(plan), time, setting.micro_batches)
    return cases


def is_overlapped(plan: Plan) -> bool:
    """Whether it swaps, and says that nothing is waited for."""
    return any(part.swap_storages for part in plan.stages) and not any(part.extra_ms for part in plan.stages)


def result(setting: Setting, plan: Plan, time: float, found: dict[str, list[Batch]]) -> dict[str, Any]:
    """One entry: medians over batches of what every stage took, and of the batch, beside what was planned."""
    planned = [part.forward_ms + part.backward_ms + part.extra_ms for part in plan.stages]
    taken = [
        median(one.forward_ms[stage] + one.backward_ms[stage] for one in found["planned"]) / time
        for stage in range(STAGES)
    ]
    fastest = [
        min(one.forward_ms[stage] + one.backward_ms[stage] for one in found["planned"]) / time
        for stage in range(STAGES)
    ]
    batch_ms = {name: median(one.ms for one in batches) / time for name, batches in found.items()}
    simulated_ms = simulated(plan, cases_of(setting, plan, time)["planned"], time).makespan_ms / time
    entry: dict[str, Any] = {
        **setting._asdict(),
        "swapped": [len(part.swap_storages) for part in plan.stages],
        "recomputed": [len(part.recompute) for part in plan.stages],
        "time_scale": time,
        "planned_stage_ms": planned,
        "stage_ms": taken,
        "worst_stage_error": max((abs(run / one - 1) for run, one in zip(taken, planned, strict=True))),
        "fastest_worst_stage_error": max((abs(run / one - 1) for run, one in zip(fastest, planned, strict=True))),
        "planned_batch_ms": simulated_ms,
        "batch_ms": batch_ms["planned"],
    }
    if "without" in batch_ms:
        entry["overlapped_swap_cost"] = batch_ms["planned"] / batch_ms["without"] - 1
        entry["fastest_overlapped_swap_cost"] = (
            min(one.ms for one in found["planned"]) / min(one.ms for one in found["without"]) - 1
        )
    return entry


def main() -> None:
    benchmark = Benchmark("planned_times", __doc__ or "", repeats=5)
    add = benchmark.parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    add("--period-ms", type=float, default=150.0, help="that the longest stage takes (default 150)")
    arguments = benchmark.parser.parse_args()
    results = []
    for setting in SETTINGS:
        if setting.title not in arguments.models:
            continue
        plan = plan_of(setting, LIMIT_BYTES)
        time = arguments.period_ms / plan.max_stage_ms
        cases = cases_of(setting, plan, time)
        with progress_bar(f"{setting.title}, {setting.schedule}", len(cases) * (arguments.repeats + 1)) as tick:
            found = run_in_processes(STAGES, measure, cases, arguments.repeats, tick=tick)
        results.append(result(setting, plan, time, found))
    settings = {"repeats": arguments.repeats, "limit_bytes": LIMIT_BYTES, "device": DEVICE.name}
    benchmark.report(settings, results, table(results))


def table(results: list[dict[str, Any]]) -> Table:
    """The same for people."""
    shown = Table("", "swapped", "recomputed", "worst stage", "batch", "overlapped swaps cost")
    for row in results:
        shown.add_row(
            f"{row['title']}, {row['schedule']}, {row['micro_batch_size']}",
            "/".join(map(str, row["swapped"])),
            "/".join(map(str, row["recomputed"])),
            f"{row['worst_stage_error']:.1%}",
            f"{row['batch_ms'] / row['planned_batch_ms'] - 1:+.1%}",
            f"{row['overlapped_swap_cost']:.1%}" if "overlapped_swap_cost" in row else "–",
        )
    return shown


if __name__ == "__main__":
    main()
