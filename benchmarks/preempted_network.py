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

  adaptive     the experiment of Ada-Grouper's Figure 10: a network that is quiet, then used by others too, then quiet
               again, and three candidates that need equal memory, from 1F1B with large micro-batches to groups of four
               small ones, which are less efficient. All run in turn all the time, and `auto` beside them: the tuner of
               `--group-size auto`, which measures the links and decides again every so many iterations.

Needs root, `ip` and `tc`; whatever it makes is removed when it ends, also where it is interrupted.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import adaptive_phases
import fixed_groups
from adaptive_picture import draw
from emulated_network import NetworkError
from emulated_pipeline import STAGES
from fixed_groups import CASES, MICRO_BATCHES
from harness import Benchmark, positive
from rich.console import Group

ADAPTIVE = "adaptive"


def main() -> None:
    benchmark = Benchmark("preempted_network", __doc__, repeats=5)
    names = [*(case.name for case in CASES), ADAPTIVE]
    add = benchmark.parser.add_argument
    add("--cases", choices=names, nargs="+", default=names, help="(default: all)")
    add("--forward-ms", type=float, default=100.0, help="a backward takes twice as long (default 100)")
    add("--group-sizes", type=positive, nargs="+", default=[1, 2, 3], help="k of kFkB, beside 1F1B (default 1 2 3)")
    add("--adaptive-forward-ms", type=float, default=50.0, help="of the largest micro-batch (default 50)")
    add("--interval", type=positive, default=20, help="iterations between decisions, and of a phase (default 20)")
    add("--samples", type=positive, default=48, help="of a batch in the adaptive case, a multiple of 4 (default 48)")
    add("--picture", type=Path, metavar="P.png", help="the adaptive case, as Ada-Grouper's Figure 10")
    add("--quick", action="store_true", help="only to see that it works: seconds instead of minutes")
    arguments = benchmark.parser.parse_args()
    if arguments.quick:
        few = {"forward_ms": 15.0, "group_sizes": [2], "repeats": 1, "cases": ["half", "constant", ADAPTIVE]}
        benchmark.parser.set_defaults(**few, adaptive_forward_ms=15.0, interval=2, samples=16)
        arguments = benchmark.parser.parse_args()
    if arguments.samples % max(b for _, b in adaptive_phases.SIZES):
        benchmark.parser.error(f"--samples {arguments.samples}: not a multiple of 4: give one that is")
    if arguments.interval < 2:
        benchmark.parser.error("--interval 1: the network has to change between two decisions: give at least 2")
    if arguments.picture is not None and ADAPTIVE not in arguments.cases:
        benchmark.parser.error(f"--picture: shows the adaptive case only: add {ADAPTIVE} to --cases")
    group_sizes = sorted({1, 2, *arguments.group_sizes})
    compute = fixed_groups.compute_of(arguments.forward_ms)
    cases = [case for case in CASES if case.name in arguments.cases]
    experiment = adaptive_phases.Experiment.of(arguments.adaptive_forward_ms, arguments.samples, arguments.interval)
    # Whatever has been made is removed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results, tables = [], []
    try:
        for case in cases:
            measured = fixed_groups.run(case, compute, group_sizes, arguments.repeats)
            results.append(fixed_groups.result(case, compute, measured))
        if cases:
            tables.append(fixed_groups.table(results, group_sizes))
        if ADAPTIVE in arguments.cases:
            results.append(adaptive_phases.result(experiment, adaptive_phases.run(experiment)))
            tables.append(adaptive_phases.table(results[-1]))
            if arguments.picture is not None:
                draw(arguments.picture, results[-1])
    except NetworkError as error:
        benchmark.parser.exit(2, f"{benchmark.parser.prog}: {error}\n")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    settings = {"stages": STAGES, "micro_batches": MICRO_BATCHES, "repeats": arguments.repeats}
    settings |= compute._asdict() | {"adaptive_forward_ms": arguments.adaptive_forward_ms}
    benchmark.report(settings, results, Group(*tables))


if __name__ == "__main__":
    main()
