"""What the one order of a pipeline gains by measured times, and what sharing communicators would cost: by simulation.

In the model of devices (`evenpipe.simulate.device`), m = 4p micro-batches, a backward twice a forward on average.
Stages are uneven: the last takes 1.5 times as long as others, or the first 1.3 times, or each up to 30 % more or less,
by chance. In percent of a batch, the mean over them, the least and the most:

    measured   the order by a clock of the true times, instead of assumed ones, with many queues; below 0 is a gain
    one queue  the same with one queue
    shared     one communicator for both directions between two stages, instead of one each; above 0 is a cost
    even       the same where stages are even
    other      the order for one queue where there are many, and (at one) the order for many where there is one
    timed      hosts wait for their devices before and after every forward and backward, as timers have them do: in the
               order for that, and (by many) in the order for many queues, against none of that
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from statistics import fmean
from typing import Any, Final

from harness import Benchmark, positive, progress_bar
from rich.table import Table

from evenpipe.schedule import Clock, LinkKind, Program, ScheduleError, Size, build, lower, reordered
from evenpipe.simulate import Costs, Wire
from evenpipe.simulate.device import Environment, run_on_devices

SCHEDULES: Final[tuple[tuple[str, dict[str, int]], ...]] = (
    ("1f1b", {}),
    ("kfkb", {"group_size": 2}),
    ("kfkb", {"group_size": 3}),
    ("interleaved", {"chunks": 2}),
    ("2bw", {"batches": 2}),
)
MESSAGES: Final = (0.1, 0.5)  # of a forward of a chunk
BY_CHANCE: Final = 4
COLUMNS: Final = ("measured", "one queue", "shared", "even", "other", "other at one", "timed", "timed by many")


def pipelines(stages: int) -> Iterator[tuple[str, Program, Program]]:
    """The programs for many queues and for one, and what they are called."""
    for (name, sizes), bpipe in ((one, bpipe) for one in SCHEDULES for bpipe in (False, True)):
        with suppress(ScheduleError):  # interleaved has nothing to level at p = 2
            many, one = (build(name, Size(stages, 4 * stages, **sizes), bpipe, queues) for queues in ("many", "one"))
            yield f"{name}{sizes.get('group_size', '')}{' + bpipe' * bpipe}", many, one


def uneven(stages: int) -> Iterator[tuple[list[float], list[float]]]:
    """Forward and backward times of stages."""
    for at, factor in ((-1, 1.5), (0, 1.3)):
        forward = [1.0] * stages
        forward[at] = factor
        yield forward, [2 * ms for ms in forward]
    for seed in range(BY_CHANCE):
        chance = random.Random(seed)
        yield ([chance.uniform(0.7, 1.3) for _ in range(stages)], [2 * chance.uniform(0.7, 1.3) for _ in range(stages)])


def costs(program: Program, forward: list[float], backward: list[float], message: float) -> Costs:
    kinds: tuple[LinkKind, ...] = ("forward", "backward", "evict", "load")
    wire = Wire(transmit_ms=message / program.schedule.chunks)
    return Costs(tuple(forward), tuple(backward), dict.fromkeys(kinds, wire))


def measured(program: Program, taken: Costs) -> Program:
    """In the order by the true times."""
    chunks, between = program.schedule.chunks, (link for link in program.links if link.kind in ("forward", "backward"))
    forward, backward = ([ms / chunks for ms in times] for times in (taken.forward_ms, taken.backward_ms))
    return reordered(program, Clock.of(forward, backward, {link: taken.wire(link).transmit_ms for link in between}))


def differences(many: Program, one: Program, other: tuple[Program, Program], taken: Costs) -> list[float]:
    """In percent, in the order of `COLUMNS`; "even" is "shared"."""
    plain, queue, shared = Environment(), Environment(one_queue=True), Environment(shared=True)
    timed = Environment(synchronised="timers")
    of_many, of_one = (run_on_devices(program, taken, where) for program, where in ((many, plain), (one, queue)))

    def percent(program: Program, where: Environment) -> float:
        return 100 * (run_on_devices(program, taken, where) / (of_one if where is queue else of_many) - 1)

    shares = percent(many, shared)
    known = percent(measured(many, taken), plain), percent(measured(one, taken), queue)
    for_timers = lower(many.schedule, many.pairs, timed.queues)
    waits = percent(for_timers, timed), percent(many, timed)
    return [*known, shares, shares, percent(other[0], plain), percent(other[1], queue), *waits]


def entry(name: str, many: Program, one: Program, message: float) -> dict[str, Any]:
    """One line of the table."""
    stages = many.schedule.stages
    other = lower(many.schedule, many.pairs, "one"), lower(one.schedule, one.pairs)
    rows = [differences(many, one, other, costs(many, *times, message)) for times in uneven(stages)]
    found = {column: [row[at] for row in rows] for at, column in enumerate(COLUMNS)}
    found["even"] = differences(many, one, other, costs(many, [1.0] * stages, [2.0] * stages, message))[3:4]
    return {"stages": stages, "schedule": name, "message": message, "percent": found}


def table(results: list[dict[str, Any]]) -> Table:
    """The same for people."""
    shown = Table("p", "schedule", "message", *COLUMNS)
    for result in results:
        cells = (f"{fmean(found):.2f} ({min(found):.1f}…{max(found):.1f})" for found in result["percent"].values())
        shown.add_row(str(result["stages"]), result["schedule"], str(result["message"]), *cells)
    return shown


def main() -> None:
    benchmark = Benchmark("orders", __doc__ or "", repeats=1)
    benchmark.parser.add_argument("--stages", type=positive, nargs="+", default=[4, 8], help="(default 4 8)")
    arguments = benchmark.parser.parse_args()
    cases = [(*one, message) for stages in arguments.stages for one in pipelines(stages) for message in MESSAGES]
    results = []
    with progress_bar("pipelines", len(cases)) as tick:
        for case in cases:
            results.append(entry(*case))
            tick()
    benchmark.report({"by_chance": BY_CHANCE}, results, table(results))


if __name__ == "__main__":
    main()
