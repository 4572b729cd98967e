"""Plans on emulated devices, in real processes: what each stage and each batch takes, beside what was planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from emulated_host import EmulatedHostLink
from emulated_parts import EmulatedPart, PartStage, scaled
from emulation import Accelerator, clock_ms, over_wires
from harness import Tick

from evenpipe.partition.dawnpiper.copies import PIPEDREAM
from evenpipe.partition.profile import Profile
from evenpipe.partition.search.plan import Plan, Stage
from evenpipe.runtime.connections import connect
from evenpipe.runtime.executor import Executor, Observer
from evenpipe.runtime.recompute_swap import Keeper
from evenpipe.schedule import Action, Program, Size, build, links, loop
from evenpipe.simulate import Costs, Simulation, Wire, simulate

__all__ = ["BYTES", "Batch", "Case", "case_of", "measure", "period_ms", "simulated"]

#: The part of a storage's bytes that is really there: what is emulated fits into the memory of one host.
BYTES: Final = 2**-12
# Long enough for every process to have left the broadcast of the start.
_START_DELAY_MS: Final = 30.0


class Case(NamedTuple):
    """A plan to be emulated; all bytes and milliseconds are scaled."""

    profile: Profile
    parts: tuple[Stage, ...]
    program: Program
    host_gbps: float


class Batch(NamedTuple):
    """One batch: its milliseconds, those of each stage's forwards and backwards, and when its backwards ended."""

    ms: float
    forward_ms: list[float]
    backward_ms: list[float]
    ends_ms: list[list[float]]


def case_of(profile: Profile, plan: Plan, time: float, micro_batches: int) -> Case:
    """`plan`, of this profile, with everything taking `time` times as long.

    PipeDream's order is that of 1F1B without an end; here it ends after so many micro-batches. Other schedules are as
    the plan has them.
    """
    asynchronous = plan.schedule == PIPEDREAM
    size = Size(plan.stage_count, micro_batches)
    program = build("1f1b", size, swaps=plan.swaps) if asynchronous else plan.program
    return Case(scaled(profile, time, BYTES), plan.stages, program, plan.host_gbps * BYTES / time)


def simulated(plan: Plan, case: Case, time: float) -> Simulation:
    """Return the batch time by the plan's own times; links between stages that it does not know are free."""
    costs = plan.costs
    forward_ms, backward_ms = (tuple(time * ms for ms in of) for of in (costs.forward_ms, costs.backward_ms))
    links = {link: Wire(time * wire.latency_ms, time * wire.transmit_ms) for link, wire in costs.links.items()}
    return simulate(case.program, Costs(forward_ms, backward_ms, links=links))


def period_ms(ends_ms: Sequence[Sequence[float]]) -> float:
    """Milliseconds from one micro-batch to the next without an end, from when each stage's backwards of 1F1B ended.

    That of the slowest stage: from its backward number p on, where it has settled, to the last that a forward follows.
    """
    stages = len(ends_ms)
    settled = [ends[stages : len(ends) - (stages - 1 - stage)] for stage, ends in enumerate(ends_ms)]
    return max((ends[-1] - ends[0]) / (len(ends) - 1) for ends in settled)


class _Times(Observer):
    """How long this stage's actions of a batch took, and when they had ended."""

    def __init__(self) -> None:
        self.took: dict[str, list[float]] = {}
        self.ended_ms: dict[str, list[float]] = {}
        self._began_ms = 0.0

    def started(self, action: Action) -> None:
        self._began_ms = clock_ms()

    def ended(self, action: Action) -> None:
        self.took.setdefault(action.kind, []).append(clock_ms() - self._began_ms)
        self.ended_ms.setdefault(action.kind, []).append(clock_ms())

    def batch_ended(self) -> None:
        """Nothing more is to be told."""


def measure(rank: int, cases: Mapping[str, Case], repeats: int, tick: Tick) -> dict[str, list[Batch]]:
    """In each process, which is a stage: every case's batches, one of each in turn; before them one that warms up."""
    cpu = torch.device("cpu")
    stages = dist.get_world_size()
    accelerator = Accelerator(0.0, 0.0)
    connections = connect(range(stages), links(loop(stages)), backend="gloo", device=cpu)
    wires = over_wires(connections, accelerator, 0.0)
    host_links = []

    def stage_of(case: Case) -> tuple[EmulatedPart, EmulatedHostLink]:
        part = EmulatedPart(case.profile, case.parts[rank], case.host_gbps, accelerator)
        host_links.append(EmulatedHostLink(accelerator, 1 / (case.host_gbps * 1e6)))
        return part, host_links[-1]

    made = {name: stage_of(case) for name, case in cases.items()}

    def batch(name: str) -> Batch:
        times = _Times()
        part, host = made[name]
        executor = Executor(rank, wires, cpu, observer=times, measure=False)
        if part.keeping.nodes:
            executor.keeper = Keeper(executor.store, cpu, host)
        start = torch.tensor(clock_ms() + _START_DELAY_MS, dtype=torch.float64)
        dist.broadcast(start, 0)
        accelerator.start(start.item())
        executor.run(cases[name].program, PartStage(part, accelerator, rank == stages - 1, executor.keeper))
        executor.store.assert_empty()
        mine = clock_ms() - start.item(), times.took, times.ended_ms["B"]
        every: list[Any] = [None] * stages
        dist.all_gather_object(every, mine)
        tick()
        took = {kind: [median(one[1][kind]) for one in every] for kind in ("F", "B")}
        return Batch(max(one[0] for one in every), took["F"], took["B"], [one[2] for one in every])

    found: dict[str, list[Batch]] = {name: [] for name in cases}
    for repeat in range(repeats + 1):
        for name in cases:
            one = batch(name)
            if repeat:
                found[name].append(one)
    for host in host_links:
        host.close()
    wires.close()
    return found
