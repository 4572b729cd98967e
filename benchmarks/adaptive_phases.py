"""Ada-Grouper's experiment (§6.2.4, Figure 10) in minutes: a network that others use for a while, and a tuner."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from competing_flows import Flow, Traffic
from emulated_network import EmulatedNetwork
from emulated_pipeline import STAGES, Compute, EmulatedPipeline, live_on, message_bytes
from emulation import clock_ms
from harness import Tick, progress_bar, run_in_processes
from rich.table import Table

from evenpipe.schedule import Programs
from evenpipe.tuner.grouped import Candidate, GroupedSchedule, StageTimes
from evenpipe.tuner.links import Ends, retune
from evenpipe.tuner.tuner import Tuner

__all__ = ["AUTO", "Experiment", "Phase", "result", "run", "table"]

AUTO: Final = "auto"
#: The same memory, k·b, for each.
SIZES: Final = ((1, 4), (2, 2), (4, 1))
#: What a micro-batch costs besides its samples, as a part of the largest one's time: small ones are less efficient.
_FIXED_PART: Final = 0.25
_MBIT: Final = 176
#: A message takes a tenth of a forward where nobody else sends.
_QUIET_PART: Final = 0.1
#: Others' flows between the two stages in the middle, each way.
_FLOWS: Final = 12
#: What flows need to get going, or to drain.
_SETTLE_MS: Final = 500.0
_DEFAULT_INTERVAL_MS: Final = 3_600_000.0


class Phase(NamedTuple):
    """So many iterations on a network that others use too, or not."""

    name: str
    preempted: bool
    iterations: int


class Experiment(NamedTuple):
    """`forward_ms` is of the largest micro-batch; the tuner decides every `interval` iterations."""

    forward_ms: float
    samples: int
    interval: int
    phases: tuple[Phase, ...]

    @classmethod
    def of(cls, forward_ms: float, samples: int, interval: int) -> Experiment:
        """Quiet, preempted, quiet; what changes, changes shortly before the next decision, which is late by so much."""
        late = max(1, interval // 10)
        phases = (
            Phase("quiet", False, interval - late),
            Phase("preempted", True, interval),
            Phase("quiet again", False, interval + late),
        )
        return cls(forward_ms, samples, interval, phases)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(Candidate(k, b, self.samples // b) for k, b in SIZES)

    @property
    def iterations(self) -> int:
        return sum(phase.iterations for phase in self.phases)

    def phase(self, iteration: int) -> Phase:
        """The one that `iteration` is in."""
        for phase in self.phases:
            if iteration < phase.iterations:
                return phase
            iteration -= phase.iterations
        raise IndexError(iteration)

    def compute(self, b: int) -> Compute:
        """A stage's part of a micro-batch of `b` samples."""
        largest = max(b for _, b in SIZES)
        forward_ms = self.forward_ms * (_FIXED_PART + (1 - _FIXED_PART) * b / largest)
        sample_bytes = message_bytes(_MBIT, self.forward_ms * _QUIET_PART / largest)
        return Compute(forward_ms, 2 * forward_ms, b * sample_bytes)


class Retuned(NamedTuple):
    """A decision: what it was, what it was made from, and the milliseconds that it took."""

    iteration: int
    chosen: str
    estimates_ms: dict[str, float]
    took_ms: float


class Record(NamedTuple):
    """Milliseconds of every iteration, by candidate and for `auto` (whose decisions are not part of them)."""

    iterations_ms: dict[str, list[float]]
    retunes: list[Retuned]


def measure(rank: int, traffic: Traffic, experiment: Experiment, tick: Tick) -> Record:
    """In each process: in every iteration each candidate, and whatever the tuner has chosen, in turn."""
    pipeline = EmulatedPipeline()
    candidates = experiment.candidates
    times = {}
    for b in {candidate.b for candidate in candidates}:
        compute = experiment.compute(b)
        times[b] = StageTimes((compute.forward_ms,) * STAGES, (compute.backward_ms,) * STAGES)
    tuner = Tuner(GroupedSchedule(Programs("kfkb"), STAGES), candidates, times, experiment.interval)
    variants = {candidate.name: candidate for candidate in candidates}
    names = [AUTO, *variants]
    record = Record({name: [] for name in names}, [])

    def batch_ms(candidate: Candidate) -> float:
        return pipeline.batch_ms(tuner.schedule.program(candidate), experiment.compute(candidate.b))

    for candidate in candidates:
        batch_ms(candidate)
    preempted = False
    for iteration in range(experiment.iterations):
        if preempted is not experiment.phase(iteration).preempted:
            preempted = not preempted
            traffic.switch(preempted)
            pipeline.rest(_SETTLE_MS)
        first = iteration % len(names)
        for name in (*names[first:], *names[:first]):
            if name == AUTO and tuner.due(iteration):
                record.retunes.append(_retuned(tuner, pipeline, experiment, iteration))
            chosen = variants.get(name) or tuner.current
            assert chosen is not None
            record.iterations_ms[name].append(batch_ms(chosen))
            tick()
    pipeline.close()
    return record


def _retuned(tuner: Tuner, pipeline: EmulatedPipeline, experiment: Experiment, iteration: int) -> Retuned:
    dist.barrier()
    began_ms = clock_ms()
    nbytes = {b: experiment.compute(b).message_bytes for _, b in SIZES}
    ends = Ends(pipeline.connections, pipeline.stage, STAGES, torch.device("cpu"))
    decided = retune(tuner, ends, nbytes, {}, iteration)
    return Retuned(iteration, f"k{decided.k}b{decided.b}", decided.estimates_ms, clock_ms() - began_ms)


def run(experiment: Experiment) -> Record:
    """The whole experiment, on a network of its own."""
    flows = [flow for _ in range(_FLOWS) for flow in (Flow(1, 2), Flow(2, 1))]
    total = experiment.iterations * (1 + len(SIZES))
    with EmulatedNetwork(STAGES) as network, progress_bar("adaptive", total) as tick:
        network.set_rate(_MBIT)
        with Traffic(network, flows) as traffic:
            return run_in_processes(STAGES, measure, traffic, experiment, tick=tick, enter=partial(live_on, network))


def result(experiment: Experiment, record: Record) -> dict[str, Any]:
    """One entry of the document: medians of every phase after its first decision, and totals with all that it cost."""
    fixed = [name for name in record.iterations_ms if name != AUTO]
    phases, begin = [], 0
    for phase in experiment.phases:
        end = begin + phase.iterations
        tuned = min(retuned.iteration for retuned in record.retunes if begin <= retuned.iteration < end)
        took_ms = {name: median(every[tuned:end]) for name, every in record.iterations_ms.items()}
        best = min(fixed, key=lambda name: took_ms[name])
        entry: dict[str, Any] = {"phase": phase.name, "preempted": phase.preempted}
        entry |= {"from": begin, "tuned": tuned, "to": end}
        entry |= {f"{name}_ms": ms for name, ms in took_ms.items()}
        phases.append(entry | {"best": best, "auto_compared": took_ms[AUTO] / took_ms[best]})
        begin = end
    retuning_ms = [retuned.took_ms for retuned in record.retunes]
    totals_ms = {name: sum(every) for name, every in record.iterations_ms.items()}
    totals_ms[AUTO] += sum(retuning_ms)
    return {
        "case": "adaptive",
        "samples": experiment.samples,
        "interval": experiment.interval,
        "phases": phases,
        "totals_ms": totals_ms,
        "auto_total_compared": totals_ms[AUTO] / min(totals_ms[name] for name in fixed),
        "retune_ms": max(retuning_ms),
        "retune_part_of_an_hour": max(retuning_ms) / _DEFAULT_INTERVAL_MS,
        "retunes": [retuned._asdict() for retuned in record.retunes],
        "iterations_ms": record.iterations_ms,
    }


def table(entry: dict[str, Any]) -> Table:
    """The same for people."""
    names: Sequence[str] = list(entry["totals_ms"])
    shown = Table("network", *(f"{name} ms" for name in names), "auto / best")
    for phase in entry["phases"]:
        times = [f"{phase[f'{name}_ms']:,.0f}" for name in names]
        shown.add_row(phase["phase"], *times, f"{phase['auto_compared']:.3f}")
    shown.add_section()
    totals = [f"{entry['totals_ms'][name]:,.0f}" for name in names]
    shown.add_row("total", *totals, f"{entry['auto_total_compared']:.3f}")
    shown.caption = f"{len(entry['retunes'])} decisions, {entry['retune_ms']:,.0f} ms at most"
    return shown
