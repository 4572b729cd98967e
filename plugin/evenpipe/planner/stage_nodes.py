"""Where a run is: its parts in stages, and its stages on nodes, with their devices and links."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, TypeVar

from evenpipe.descriptions import Cluster, Device, Model
from evenpipe.planner.iteration import HandOver, PartTime, hand_over
from evenpipe.planner.kernels import Calibration, Kernels, in_pairs
from evenpipe.planner.run import Run
from evenpipe.schedule import Places, partner

__all__ = ["ONLY", "Groups", "Placed", "Positions", "StageNodes", "positions_of", "slowest"]

#: Numbers of the groups of equal nodes that the GPUs of one stage are in.
Groups = frozenset[int]
#: The groups of a cluster whose nodes are all equal.
ONLY: Final[Groups] = frozenset({0})

_Times = TypeVar("_Times", PartTime, HandOver)


def slowest(times: Sequence[_Times]) -> _Times:
    """Return the longest of each time: all members wait for it."""
    return times[0] if len(times) == 1 else type(times[0])(*map(max, zip(*times, strict=True)))


class Positions(NamedTuple):
    """Where the parts of a pipeline are, and what its stages hand over.

    at: the positions of each stage's parts. stages: of each position, its stage. sends, returns: of each stage, how
    many of its forwards and backwards hand over to another.
    """

    at: Sequence[Sequence[int]]
    stages: Sequence[int]
    sends: Sequence[int]
    returns: Sequence[int]


@cache
def positions_of(places: Places) -> Positions:
    """Return where the parts of a pipeline are.

    The result is the same for equal places, however many micro-batches go through them.
    """
    stages = [place.stage for place in places.order]
    at = [[places.position(stage, chunk) for chunk in range(places.chunks)] for stage in range(places.stages)]
    sends = [sum(n + 1 < len(stages) and stages[n + 1] != stage for n in own) for stage, own in enumerate(at)]
    returns = [sum(n > 0 and stages[n - 1] != stage for n in own) for stage, own in enumerate(at)]
    return Positions(at, stages, sends, returns)


class _Order(NamedTuple):
    """How a run's ranks lie: ``cell`` of them for each stage of each replica, in the order that `Links` says."""

    cell: int
    stages: int
    data: int
    pipelines_first: bool
    in_pairs: bool


class StageNodes:
    """The groups of a cluster's nodes, and those that the stages of runs are in."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.alike: Final = not cluster.groups
        self._ends = list(accumulate(group.gpus for group in cluster.kinds))
        self._cells = cache(self._cells_of)
        self.clusters = cache(self._clusters)
        self.device = cache(self._device)

    def of_stages(self, run: Run) -> Sequence[Groups]:
        """Return, by stage, the groups that its replicas are in."""
        return [ONLY] * run.stages if self.alike else [Groups(cells) for cells in self._cells(self._order(run))]

    def of_both(self, run: Run, stage: int, other: int) -> Iterable[Groups]:
        """Return the groups of two stages for each replica; equal ones once."""
        if self.alike:
            return [ONLY]
        cells = self._cells(self._order(run))
        return {Groups(pair) for pair in zip(cells[stage], cells[other], strict=True)}

    def _device(self, groups: Groups) -> Device:
        """Return the device of these groups that has the least memory for a run."""
        return min((one.device for one in self.clusters(groups)), key=lambda one: one.memory_gib - one.reserve_gib)

    def lacking(self, groups: Groups) -> int:
        """Return by how many bytes the groups' device is smaller than the cluster's largest."""
        return round((self.cluster.device.memory_gib - self.device(groups).memory_gib) * 2**30)

    def names(self, groups: Groups) -> str:
        """Return the names of the groups' nodes; empty where all nodes are equal."""
        return "" if self.alike else " and ".join(self.cluster.groups[number].name for number in sorted(groups))

    def _clusters(self, groups: Groups) -> Sequence[Cluster]:
        """Return each group as a cluster of its own; several of them linked as groups are."""
        found = [self.cluster.kinds[number] for number in sorted(groups)]
        if len(found) == 1:
            return found
        every = [self.cluster, *found]
        links = {
            "node_gbps": min(one.node_gbps for one in every),
            "node_latency_us": max(one.node_latency_us for one in every),
        }
        return [one.model_copy(update=links) for one in found]

    def _order(self, run: Run) -> _Order:
        pairs = in_pairs(run, self.cluster)
        first = pairs or run.placement == "pipeline"
        return _Order(run.tensor * run.context, run.stages, run.data, first, pairs and run.placement == "replicas")

    def _cells_of(self, order: _Order) -> Sequence[Sequence[int]]:
        """Return, by stage, the group that each replica's ranks are in."""
        found = []
        for stage in range(order.stages):
            at, other = stage, partner(stage, order.stages)
            if order.in_pairs:  # 0, p - 1, 1, p - 2, ...
                at = 2 * min(stage, other) + (stage > other)
            cells = (
                replica * order.stages + at if order.pipelines_first else at * order.data + replica
                for replica in range(order.data)
            )
            found.append([bisect_right(self._ends, cell * order.cell) for cell in cells])
        return found


class Placed:
    """One run on its nodes. ``groups``: of each stage."""

    def __init__(self, run: Run, nodes: StageNodes, calibration: Calibration) -> None:
        self._run, self._nodes = run, nodes
        self.groups = nodes.of_stages(run)
        self.kernels = cache(lambda of: [Kernels(run, one, calibration) for one in nodes.clusters(of)])

    def between(self, stage: int, other: int) -> Iterable[Kernels]:
        """Yield the kernels, and so the links, of both stages' nodes, in all replicas."""
        for groups in self._nodes.of_both(self._run, stage, other):
            yield from self.kernels(groups)

    def hand_over(self, model: Model, run: Run, stage: int, other: int) -> HandOver:
        """Return the time of a hand-over between two stages under the schedule of ``run``, by the slowest link."""
        return slowest([hand_over(model, run, kernels.links) for kernels in self.between(stage, other)])

    def fastest_hand_over(self, model: Model, run: Run, stages: Sequence[int]) -> HandOver:
        """Return the least of all hand-overs between neighbours; ``stages``: of the model's parts, in its order."""
        hops = dict.fromkeys(hop for hop in pairwise(stages) if hop[0] != hop[1])
        each = [self.hand_over(model, run, *hop) for hop in (list(hops)[:1] if self._nodes.alike else hops)]
        return HandOver(*map(min, zip(*each, strict=True))) if each else HandOver(0.0, 0.0, 0.0)
