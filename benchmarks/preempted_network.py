"""What kFkB gains where links are slow or shared with others, and how well the simulator predicts it.

Measured: the time of a batch of 1F1B (k = 1) and of kFkB with groups of k, which have the same transfers in other
orders. All k run by turns in the same processes; the figures are medians. Before each turn the links are measured as
`--group-size auto` does (evenpipe.tuner.links), and beside each figure stands what the simulator makes of that.

On: four nodes, which are network namespaces on a bridge, with a rate (HTB) from each to each. A stage is a process on a
node: the executor and the channels (gloo, TCP) that train real models carry real messages. Compute is emulated: a
forward sleeps, a backward sleeps twice as long, to absolute deadlines. A message takes about half a forward.

  fast         links that take next to no time
  half         links on which a message takes half a forward (Ada-Grouper's Figure 2)
  constant     the same, and a TCP flow of somebody else's on one link, all the time
  on and off   the same, and such a flow that comes and goes

Needs root, `ip` and `tc`; whatever it makes is removed when it ends, also where it is interrupted.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from functools import partial
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from competing_flows import Flow, Traffic
from emulated_network import EmulatedNetwork, NetworkError
from emulated_pipeline import Compute, EmulatedPipeline, live_on
from emulation import clock_ms
from harness import Benchmark, Tick, positive, progress_bar, run_in_processes
from rich.table import Table

from evenpipe.planner import StageTimes, estimate_ms
from evenpipe.schedule import Link, Program, build, lower
from evenpipe.tuner.links import Burst

STAGES: Final = 4
MICRO_BATCHES: Final = 12
FAST_MBIT: Final = 10_000
SLOW_MBIT: Final = 176
#: Of what a link carries, TCP's and Ethernet's headers left out.
GOODPUT: Final = 1448 / 1514


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
    return {k: lower(build("kfkb", STAGES, MICRO_BATCHES, group_size=k)) for k in group_sizes}


def compute_of(forward_ms: float) -> Compute:
    """A message takes half a forward on a slow link that nobody else uses."""
    message_bytes = SLOW_MBIT * 1e6 / 8 * GOODPUT * forward_ms / 2e3
    return Compute(forward_ms, 2 * forward_ms, int(message_bytes) // 4 * 4)


def measure(
    rank: int, traffic: Traffic, compute: Compute, group_sizes: Sequence[int], repeats: int, tick: Tick
) -> Measured:
    """In each process: all batches of a case."""
    pipeline = EmulatedPipeline()
    todo = programs(group_sizes)
    traffic.switch(True)
    pipeline.batch_ms(todo[group_sizes[0]], compute)
    measured = Measured({k: [] for k in group_sizes}, {k: [] for k in group_sizes}, [])
    for turn in range(repeats):
        began_ms = clock_ms()
        message_ms = pipeline.message_ms([Burst(k, compute.message_bytes) for k in group_sizes])
        measured.measuring_ms.append(clock_ms() - began_ms)
        for k, of_links in zip(group_sizes, message_ms, strict=True):
            measured.message_ms[k].append(of_links)
        first = turn % len(group_sizes)
        for k in (*group_sizes[first:], *group_sizes[:first]):
            measured.batches_ms[k].append(pipeline.batch_ms(todo[k], compute))
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
    todo = programs(list(batch_ms))
    entry: dict[str, Any] = {"case": case.name, "mbit": case.mbit, "flows": [flow._asdict() for flow in case.flows]}
    for k, took_ms in batch_ms.items():
        turns = measured.message_ms[k]
        message_ms = {link: fmean(turn[link] for turn in turns) for link in turns[0]}
        simulated_ms = estimate_ms(todo[k], times, message_ms)
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


def main() -> None:
    benchmark = Benchmark("preempted_network", __doc__, repeats=5)
    add = benchmark.parser.add_argument
    names = [case.name for case in CASES]
    add("--cases", choices=names, nargs="+", help="(default: all)")
    add("--group-sizes", type=positive, nargs="+", default=[1, 2, 3], help="k of kFkB, beside 1F1B (default 1 2 3)")
    add("--forward-ms", type=float, default=100.0, help="a backward takes twice as long (default 100)")
    add("--quick", action="store_true", help="only to see that it works: seconds instead of minutes")
    arguments = benchmark.parser.parse_args()
    if arguments.quick:
        benchmark.parser.set_defaults(cases=["half", "constant"], group_sizes=[2], forward_ms=20.0, repeats=2)
        arguments = benchmark.parser.parse_args()
    cases = [case for case in CASES if case.name in (arguments.cases or names)]
    group_sizes = sorted({1, 2, *arguments.group_sizes})
    compute = compute_of(arguments.forward_ms)
    # Whatever has been made is removed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        results = [result(case, compute, run(case, compute, group_sizes, arguments.repeats)) for case in cases]
    except NetworkError as error:
        benchmark.parser.exit(2, f"{benchmark.parser.prog}: {error}\n")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    settings = compute._asdict() | {"stages": STAGES, "micro_batches": MICRO_BATCHES, "repeats": arguments.repeats}
    benchmark.report(settings, results, table(results, group_sizes))


if __name__ == "__main__":
    main()
