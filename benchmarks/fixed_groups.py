"""kFkB with every group size in turn, on one network after the other, beside what the simulator makes of its links."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from competing_flows import Flow, Traffic
from emulated_network import EmulatedNetwork
from emulated_pipeline import STAGES, Compute, EmulatedPipeline, live_on, message_bytes
from emulation import clock_ms
from harness import Tick, progress_bar, run_in_processes
from rich.table import Table

from evenpipe.schedule import Link, Program, Size, build
from evenpipe.tuner.grouped import StageTimes, estimate_ms
from evenpipe.tuner.links import Burst

__all__ = ["CASES", "MICRO_BATCHES", "Case", "compute_of", "result", "run", "table"]

MICRO_BATCHES: Final = 12
FAST_MBIT: Final = 10_000
SLOW_MBIT: Final = 176


class Case(NamedTuple):
    """What the network is like."""

    name: str
    mbit: int
    flows: tuple[Flow, ...] = ()


CASES: Final = (
    Case("fast", FAST_MBIT),
    Case("half", SLOW_MBIT),
    Case("constant", SLOW_MBIT, (Flow(0, 1),)),
    Case("on and off", SLOW_MBIT, (Flow(0, 1, on_s=0.5, off_s=0.5),)),
)


class Measured(NamedTuple):
    """Per k the milliseconds of every batch, and of every turn those of a message on each link; of measuring them."""

    batches_ms: dict[int, list[float]]
    message_ms: dict[int, list[dict[Link, float]]]
    measuring_ms: list[float]


def programs(group_sizes: Sequence[int]) -> dict[int, Program]:
    """What each k carries out."""
    return {k: build("kfkb", Size(STAGES, MICRO_BATCHES, group_size=k)) for k in group_sizes}


def compute_of(forward_ms: float) -> Compute:
    """A message takes half a forward on a slow link that nobody else uses."""
    return Compute(forward_ms, 2 * forward_ms, message_bytes(SLOW_MBIT, forward_ms / 2))


def measure(
    rank: int, traffic: Traffic, compute: Compute, group_sizes: Sequence[int], repeats: int, tick: Tick
) -> Measured:
    """In each process: all batches of a case."""
    pipeline = EmulatedPipeline()
    carried_out = programs(group_sizes)
    traffic.switch(True)
    pipeline.batch_ms(carried_out[group_sizes[0]], compute)
    measured = Measured({k: [] for k in group_sizes}, {k: [] for k in group_sizes}, [])
    for turn in range(repeats):
        began_ms = clock_ms()
        message_ms = pipeline.message_ms([Burst(k, compute.message_bytes) for k in group_sizes])
        measured.measuring_ms.append(clock_ms() - began_ms)
        for k, of_links in zip(group_sizes, message_ms, strict=True):
            measured.message_ms[k].append(of_links)
        first = turn % len(group_sizes)
        for k in (*group_sizes[first:], *group_sizes[:first]):
            measured.batches_ms[k].append(pipeline.batch_ms(carried_out[k], compute))
            tick()
    pipeline.close()
    return measured


def run(case: Case, compute: Compute, group_sizes: Sequence[int], repeats: int) -> Measured:
    """Measure one case, on a network of its own."""
    with EmulatedNetwork(STAGES) as network, progress_bar(case.name, repeats * len(group_sizes)) as tick:
        network.set_rate(case.mbit)
        with Traffic(network, case.flows) as traffic:
            arguments = (traffic, compute, group_sizes, repeats)
            return run_in_processes(STAGES, measure, *arguments, tick=tick, enter=partial(live_on, network))


def result(case: Case, compute: Compute, measured: Measured) -> dict[str, Any]:
    """One entry of the document: medians, the throughput compared with 1F1B's, and what the simulator says of it."""
    times = StageTimes((compute.forward_ms,) * STAGES, (compute.backward_ms,) * STAGES)
    batch_ms = {k: median(batches) for k, batches in measured.batches_ms.items()}
    carried_out = programs(list(batch_ms))
    entry: dict[str, Any] = {"case": case.name, "mbit": case.mbit, "flows": [flow._asdict() for flow in case.flows]}
    for k, took_ms in batch_ms.items():
        turns = measured.message_ms[k]
        message_ms = {link: fmean(turn[link] for turn in turns) for link in turns[0]}
        simulated_ms = estimate_ms(carried_out[k], times, message_ms)
        entry |= {
            f"k{k}_ms": took_ms,
            f"k{k}_speed_up": batch_ms[min(batch_ms)] / took_ms,
            f"k{k}_simulated_ms": simulated_ms,
            f"k{k}_simulated_error": simulated_ms / took_ms - 1,
            f"k{k}_message_ms": {f"{link.kind} {link.source}": ms for link, ms in sorted(message_ms.items())},
        }
    best = max((k for k in batch_ms if k > 1), key=lambda k: entry[f"k{k}_speed_up"])
    entry |= {"best_k": best, "best_speed_up": entry[f"k{best}_speed_up"]}
    entry["measuring_ms"] = median(measured.measuring_ms)
    return entry | {"batches_ms": {f"k{k}": batches for k, batches in measured.batches_ms.items()}}


def table(results: Sequence[dict[str, Any]], group_sizes: Sequence[int]) -> Table:
    """The same for people."""
    shown = Table("network", "k", "ms", "speed-up", "simulated ms", "error", "slowest message ms")
    for entry in results:
        for k in group_sizes:
            shown.add_row(
                entry["case"] if k == group_sizes[0] else "",
                str(k),
                f"{entry[f'k{k}_ms']:,.0f}",
                f"{entry[f'k{k}_speed_up']:.3f}",
                f"{entry[f'k{k}_simulated_ms']:,.0f}",
                f"{entry[f'k{k}_simulated_error']:+.1%}",
                f"{max(entry[f'k{k}_message_ms'].values()):.1f}",
            )
        shown.add_section()
    return shown
