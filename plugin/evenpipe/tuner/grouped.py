"""A schedule whose micro-batches run in groups of a size to be chosen: what it saves, and how long a batch takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from statistics import fmean
from typing import NamedTuple

from evenpipe.schedule import Clock, Link, Program, Programs, Size, build, reordered
from evenpipe.simulate import Costs, Wire, simulate

__all__ = ["Candidate", "GroupedSchedule", "StageTimes", "average_ms", "estimate_ms"]


class Candidate(NamedTuple):
    """Groups of ``k`` micro-batches of ``b`` samples, of which a replica's batch has ``m``."""

    k: int
    b: int
    m: int

    @property
    def name(self) -> str:
        """Such as k2b4."""
        return f"k{self.k}b{self.b}"


class GroupedSchedule(NamedTuple):
    """A schedule with groups, BPipe or not, for training on p ``stages``; its sizes are still to be chosen."""

    programs: Programs
    stages: int

    def program(self, candidate: Candidate) -> Program:
        """Return what is carried out under ``candidate``: built when it is first asked for, and kept."""
        return self.programs(self._size(candidate))

    def ordered(
        self, candidate: Candidate, times: StageTimes, message_ms: Mapping[Link, float]
    ) -> tuple[Program, float]:
        """Return the program of ``candidate`` in the order in which a batch takes least, and ms.

        That is the order by assumed times, by these, or that which puts messages off. From the same numbers the same,
        wherever it is asked for. No order has more `messages_at_once`.
        """
        queues, most = self.programs.queues, self.messages_at_once(candidate)
        assumed = reordered(self.program(candidate), None, queues)
        others = [reordered(assumed, Clock.of(*times, message_ms))]
        others += [reordered(assumed, None, "one")] if queues == "many" else []
        fitting = [
            other
            for other in others
            if all(other.order.messages_at_once(stage) <= most[stage] for stage in range(self.stages))
        ]
        estimates = [(program, estimate_ms(program, times, message_ms)) for program in [assumed, *fitting]]
        return min(estimates, key=itemgetter(1))

    def keep(self, candidate: Candidate, program: Program) -> None:
        """Have ``program`` carried out under ``candidate`` from now on."""
        self.programs.keep(self._size(candidate), program)

    def saved_bytes(self, units: Sequence[int], candidate: Candidate) -> tuple[int, ...]:
        """Per stage, the peak of own plus accepted saved activations; ``units[s]``: those of a micro-batch of stage s.

        Times do not matter, since transfers are waited for by the schedule's bound. Many candidates are weighed of
        which few are carried out, so nothing is kept.
        """
        spec, size = self.programs.spec, self._size(candidate)
        if spec.live is not None and not self.programs.bpipe:
            return tuple(live * unit for live, unit in zip(spec.live(size), units, strict=True))
        costs = Costs((1.0,) * self.stages, (2.0,) * self.stages)
        simulation = simulate(self._settled(candidate), costs, [(unit,) for unit in units])
        return tuple(stage.peak_bytes for stage in simulation.stages)

    def messages_at_once(self, candidate: Candidate) -> tuple[int, ...]:
        """Per stage, the most messages that are under way at once: by an order of measured times a group's more."""
        order = self._settled(candidate).order
        return tuple(order.messages_at_once(stage) + candidate.k for stage in range(self.stages))

    def _settled(self, candidate: Candidate) -> Program:
        """Return a program of as many micro-batches as it takes to hold as much as under ``candidate``."""
        spec, size = self.programs.spec, self._size(candidate)
        if spec.settled is not None:
            size = size._replace(micro_batches=spec.settled(size))
        return build(spec, size, self.programs.bpipe, self.programs.queues)

    def _size(self, candidate: Candidate) -> Size:
        return Size(self.stages, candidate.m, group_size=candidate.k)


class StageTimes(NamedTuple):
    """Per stage, milliseconds that it computes for one micro-batch of one size."""

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]


def average_ms(measured_ms: Iterable[float]) -> float:
    """Return the mean of two or more times of the same computation but the longest (Ada-Grouper §5.2).

    Nobody else uses the device (§4.3), so what takes much longer than the rest has been held up by a busy host.
    """
    return fmean(sorted(measured_ms)[:-1])


def estimate_ms(program: Program, times: StageTimes, message_ms: Mapping[Link, float]) -> float:
    """Milliseconds from the first forward of a batch to its last backward, from the simulator (Ada-Grouper §4.3).

    `message_ms` is what one message, eviction or load takes on a link end to end, and occupies it; links that are left
    out are free.
    """
    wires = {link: Wire(transmit_ms=ms) for link, ms in message_ms.items()}
    return simulate(program, Costs(times.forward_ms, times.backward_ms, links=wires)).makespan_ms
