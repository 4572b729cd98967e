"""Links between stages, and the time of a batch over them, for many ways to cut a model at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

import numpy as np

from evenpipe.descriptions import Cluster
from evenpipe.partition.costs.matrices import Numbers
from evenpipe.partition.dawnpiper.copies import PIPEDREAM, Workload
from evenpipe.partition.dawnpiper.problem import Problem
from evenpipe.partition.search.plan import Crossing
from evenpipe.schedule import Program, Size, build, find
from evenpipe.simulate import ManyCosts

__all__ = ["BatchClock", "StageLinks"]

#: Batches of a schedule that streams: alone, and so many without a flush.
_STREAM: Final = 3
#: Micro-batches × stages beyond which shorter batches are simulated, and counted on.
_MOST_UNITS: Final = 512


class StageLinks(NamedTuple):
    """The links between stages, which fill nodes of `per_node` one after the other (None: all are in one node).

    gbps: 10^9 bytes/s, one way. latency_ms: of a message. node_gbps, node_latency_ms: between nodes.
    """

    gbps: float
    latency_ms: float = 0.0
    per_node: int | None = None
    node_gbps: float | None = None
    node_latency_ms: float = 0.0

    @classmethod
    def of(cls, cluster: Cluster) -> StageLinks:
        """Return the links of a cluster with one stage on each GPU, in order."""
        inside_ms, between_ms = cluster.latency_us / 1e3, cluster.node_latency_us / 1e3
        return cls(cluster.peer_gbps, inside_ms, cluster.gpus_per_node, cluster.node_gbps, between_ms)

    def between(self, one: int, other: int) -> tuple[float, float]:
        """Return gbps and latency_ms of the link between two stages."""
        if self.per_node is not None and self.node_gbps is not None and one // self.per_node != other // self.per_node:
            return self.node_gbps, self.node_latency_ms
        return self.gbps, self.latency_ms


#: Weighted simulations that add up to one view of a batch.
_View = list[tuple[float, Program, ManyCosts]]


class BatchClock:
    """The simulator's milliseconds of a batch, with messages on links, for rows of cuts of one model.

    A schedule that streams has two views: a batch alone, and the mean of several without a flush.
    """

    def __init__(self, problem: Problem, workload: Workload, links: StageLinks) -> None:
        """Raises ScheduleError where there is no such schedule."""
        self._costs, self._links, self._owners = problem.costs, links, np.array(problem.copies.owners)
        self._stages = problem.copies.stages
        self._views = _views(workload, self._stages)

    @property
    def views(self) -> int:
        return len(self._views)

    def ms(self, cuts: Numbers, extra_ms: Numbers) -> Numbers:
        """Return rows × views. `cuts`: rows of all boundaries, from 0 to the last; `extra_ms`: rows × positions."""
        starts = self._costs.starts[cuts]
        forward = self._of_stages(np.diff(self._costs.forward_upto[starts], axis=1))
        backward = self._of_stages(np.diff(self._costs.backward_upto[starts], axis=1) + extra_ms)
        sent = self._costs.cut_bytes[cuts[:, 1:-1]]
        ms = np.zeros((len(cuts), len(self._views)))
        for number, view in enumerate(self._views):
            for weight, program, clock in view:
                ms[:, number] += weight * clock.makespans(forward, backward, *self._wires(program, sent))
        return ms

    def crossings(self, cuts: Sequence[int]) -> tuple[Crossing, ...]:
        """Return the message of each cut, one way."""
        crossings = []
        for cut, before, behind in zip(cuts[1:-1], self._owners[:-1].tolist(), self._owners[1:].tolist(), strict=True):
            nbytes = int(self._costs.cut_bytes[cut]) if before != behind else 0
            gbps, latency_ms = self._links.between(before, behind) if before != behind else (inf, 0.0)
            crossings.append(Crossing(nbytes=nbytes, transmit_ms=nbytes / (gbps * 1e6), latency_ms=latency_ms))
        return tuple(crossings)

    def _of_stages(self, of_positions: Numbers) -> Numbers:
        of_stages = np.zeros((len(of_positions), self._stages))
        for position, owner in enumerate(self._owners.tolist()):
            of_stages[:, owner] += of_positions[:, position]
        return of_stages

    def _wires(self, program: Program, sent: Numbers) -> tuple[Numbers, Numbers]:
        """Return rows × links of the program: transmission and latency. Cuts on one link send the mean of theirs."""
        links = program.wiring.links
        transmit, latency = np.zeros((len(sent), len(links))), np.zeros((len(sent), len(links)))
        for number, link in enumerate(links):
            ends = {"forward": (link.source, link.target), "backward": (link.target, link.source)}.get(link.kind)
            if ends is None:
                continue
            over = np.flatnonzero((self._owners[:-1] == ends[0]) & (self._owners[1:] == ends[1]))
            if len(over):
                gbps, latency[:, number] = self._links.between(*ends)
                transmit[:, number] = sent[:, over].mean(axis=1) / (gbps * 1e6)
        return transmit, latency


def _views(workload: Workload, stages: int) -> list[_View]:
    if workload.schedule == PIPEDREAM:  # 1F1B's order without an end, which is not built
        return [[_simulation(1.0, build("1f1b", Size(stages, 4 * stages)))]]
    batches = (1, _STREAM) if "stream" in find(workload.schedule).needs else (1,)
    return [_view(workload, stages, count) for count in batches]


def _view(workload: Workload, stages: int, batches: int) -> _View:
    """Return the mean of so many batches. A long one extrapolates from two shorter ones that differ by two periods."""
    asked, period = workload.micro_batches, stages * workload.group_size

    def simulation(weight: float, micro_batches: int) -> tuple[float, Program, ManyCosts]:
        size = Size(stages, micro_batches, workload.chunks, workload.group_size, batches)
        return _simulation(weight / batches, build(workload.schedule, size, bpipe=workload.bpipe))

    first = 2 * period + asked % period
    second = first + 2 * period
    if asked <= second or asked * stages * workload.chunks * batches <= _MOST_UNITS:
        return [simulation(1.0, asked)]
    more = (asked - second) / (second - first)
    return [simulation(-more, first), simulation(1 + more, second)]


def _simulation(weight: float, program: Program) -> tuple[float, Program, ManyCosts]:
    return weight, program, ManyCosts(program)
