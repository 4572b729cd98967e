"""A model's partition for a schedule and a memory limit, as a document: `evenpipe.partition/1`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from statistics import fmean
from typing import ClassVar, Literal

from pydantic import AliasChoices, Field

from evenpipe.partition.dawnpiper.capuchin import Fit, Optimize
from evenpipe.partition.dawnpiper.copies import PIPEDREAM, Workload
from evenpipe.partition.dawnpiper.problem import PartitionError, Problem
from evenpipe.partition.profile import Document, Frozen, Origin, Profile
from evenpipe.schedule import Link, Program, Size, build
from evenpipe.simulate import Costs, Wire

__all__ = ["Algorithm", "Alternative", "Crossing", "Plan", "Stage", "plan_of"]

#: What made a partition: the exact search, Algorithm 1, the exact search among cuts that send little, layer cuts that
#: the simulator finds fastest, and boundaries moved by the simulator.
Algorithm = Literal["exact", "bipar", "quiet", "layers", "moved"]


class Stage(Frozen):
    """The nodes of one part of the model, and what its stage does for each micro-batch of it.

    Each chunk of a stage is a part; both peaks are of the whole stage. `peak_bytes_before`: without memory
    optimisation. `recompute`: nodes that run again. `swap`, and `drop` (freed and computed again): the producers of
    the storages with the profile's numbers `swap_storages` and `drop_storages`. The terms of a peak, which older
    documents lack: `kept_bytes` of a micro-batch from its forward to its backward; `weight_bytes`, one version of the
    weights; `beside_bytes`, all but kept bytes and further versions.
    """

    stage: int
    first_node: int
    last_node: int
    forward_ms: float
    backward_ms: float
    extra_ms: float
    peak_bytes_before: int
    peak_bytes: int
    recompute: tuple[str, ...] = ()
    swap: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    swap_storages: tuple[int, ...] = ()
    drop_storages: tuple[int, ...] = ()
    kept_bytes: int | None = None
    weight_bytes: int | None = None
    beside_bytes: int | None = None

    @property
    def ms(self) -> float:
        """Return the milliseconds of a micro-batch, with what memory optimisation adds."""
        return self.forward_ms + self.backward_ms + self.extra_ms


class Crossing(Frozen):
    """Bytes that a cut sends for each micro-batch, one way, and the milliseconds they take (0: taken to be free)."""

    nbytes: int
    transmit_ms: float
    latency_ms: float

    @property
    def ms(self) -> float:
        return self.transmit_ms + self.latency_ms


class Alternative(Frozen):
    """Another way to cut: the last node of each part but the last, the longest part, bytes sent one way, a batch."""

    algorithm: Algorithm
    cuts: tuple[int, ...]
    max_stage_ms: float
    sent_bytes: int
    batch_ms: float


class Plan(Document):
    """Where a model is cut, for one model, shape and schedule: another has another plan.

    `cuts`: the last node of each part but the last. `max_stage_ms`: of the longest part, with what memory optimisation
    adds; no partition is below `optimum_ms`. With memory optimisation that holds for stages that recompute and swap
    the picks of `capuchin.fit`, given that a range that it cannot make fit does not fit with more nodes.
    `binary_ms`: of Algorithm 1 alone, as far as it is followed for a plan; None if nothing of that fits.
    `nodes_tried`: how many different cuts Algorithm 1 tried; `binary_whole`: whether it was followed to its end.
    `algorithm`: made these cuts. `host_gbps`: of a stage's link to its host, each way (older documents: `link_gbps`).

    Where links between stages are known: `crossings`, the messages of each cut; `batch_ms`, a batch by the simulator
    (of a schedule that streams, the mean of several); `layers_batch_ms` with the fastest layer cuts; and `front`, the
    ways to cut that no other beats in both the longest part and the bytes to send.
    `code`: the SHA-256 of each file that was written beside the plan, by name. `model_bytes`: of the uncut model's
    parameters, each counted once; older documents lack it.
    """

    Invalid: ClassVar[type[ValueError]] = PartitionError
    indent: ClassVar[int | None] = 1
    format: Literal["evenpipe.partition/1"] = "evenpipe.partition/1"
    search_ms: float
    nodes_tried: int
    max_stage_ms: float
    optimum_ms: float
    binary_ms: float | None
    cuts: tuple[int, ...]
    stages: tuple[Stage, ...] = Field(min_length=1)
    origin: Origin
    schedule: str
    micro_batches: int
    chunks: int = 1
    group_size: int = 1
    bpipe: bool = False
    limit_bytes: int
    optimize: Optimize
    host_gbps: float = Field(validation_alias=AliasChoices("host_gbps", "link_gbps"))
    algorithm: Algorithm | None = None
    binary_whole: bool | None = None
    crossings: tuple[Crossing, ...] = ()
    batch_ms: float | None = None
    layers_batch_ms: float | None = None
    front: tuple[Alternative, ...] = ()
    code: dict[str, str] = Field(default_factory=dict)
    model_bytes: int | None = None

    @property
    def stage_count(self) -> int:
        """Fewer than `stages` has parts where stages have several chunks."""
        return len({part.stage for part in self.stages})

    @property
    def workload(self) -> Workload:
        """The schedule that it is for."""
        return Workload(self.schedule, self.micro_batches, self.chunks, self.group_size, self.bpipe)

    @property
    def program(self) -> Program:
        """Return the program that trains it. Raises PartitionError for PipeDream's, ScheduleError for a wrong size."""
        self.check_trained()
        size = Size(self.stage_count, self.micro_batches, self.chunks, self.group_size)
        return build(self.schedule, size, self.bpipe, swaps=self.swaps)

    @property
    def costs(self) -> Costs:
        """Return the times of its stages and links, for the simulator. Cuts on one link send the mean of theirs."""
        stages = range(self.stage_count)
        forward, backward = [0.0] * len(stages), [0.0] * len(stages)
        for part in self.stages:
            forward[part.stage] += part.forward_ms
            backward[part.stage] += part.backward_ms + part.extra_ms
        crossing = defaultdict[tuple[int, int], list[Crossing]](list)
        for one, (before, behind) in zip(self.crossings, pairwise(self.stages), strict=False):
            if before.stage != behind.stage:
                crossing[before.stage, behind.stage].append(one)
        links = dict[Link, Wire]()
        for ends, over in crossing.items():
            wire = Wire(over[0].latency_ms, fmean(one.transmit_ms for one in over))
            links |= {Link("forward", *ends): wire, Link("backward", *reversed(ends)): wire}
        return Costs(tuple(forward), tuple(backward), links=links)

    @property
    def warnings(self) -> list[str]:
        """Return a line for each of Theorem 4.1's conditions that is known not to hold: the second is looked at."""
        slow = [one.ms for one in self.crossings]
        least = min(self.stages, key=lambda part: part.ms)
        if not slow or 2 * max(slow) < least.ms:
            return []
        cut = slow.index(max(slow))
        return [
            f"messages are not short (condition 2 of DawnPiper's Theorem 4.1): there and back over cut {cut} they take "
            f"{2 * slow[cut]:.4g} ms a micro-batch, and stage {least.stage} computes for {least.ms:.4g} ms: fewer "
            "stages, larger micro-batches or faster links would help more than other cuts"
        ]

    def check_trained(self) -> None:
        """Raises PartitionError where nothing trains its schedule."""
        if self.schedule == PIPEDREAM:
            raise PartitionError(
                f"schedule={PIPEDREAM}, which the plan is for, is weighed and not trained: make one with "
                "--schedule 1f1b, or another that evenpipe schedule shows"
            )

    @property
    def swaps(self) -> tuple[int, ...]:
        """The positions of the parts that swap tensors to their hosts."""
        return tuple(position for position, part in enumerate(self.stages) if part.swap_storages)

    def check(self, profile: Profile) -> None:
        """Raises PartitionError, one line, if it is of another model or shape."""
        mine, other = self.origin, profile.origin
        for name in ("model", "micro_batch_size", "precision", "digest"):
            if getattr(mine, name) != getattr(other, name):
                raise PartitionError(
                    f"the plan is of {name} {getattr(mine, name)}, not {getattr(other, name)}: make one of this model"
                )


def plan_of(problem: Problem, cuts: Sequence[int], fits: Sequence[Fit], workload: Workload) -> Plan:
    """Return the plan of any partition, searched or not: `cuts` are its boundaries, from 0 to the last."""
    costs, copies = problem.costs, problem.copies
    nodes, storages = costs.profile.nodes, costs.profile.storages
    ranges = list(pairwise(costs.starts[list(cuts)].tolist()))
    before, after = problem.peaks_of(cuts, problem.as_it_is(cuts)), problem.peaks_of(cuts, fits)

    def producers(numbers: Sequence[int]) -> tuple[str, ...]:
        made_by = (storages[number].producer for number in numbers)
        return tuple(dict.fromkeys(nodes[node].name if node >= 0 else "input" for node in made_by))

    parts = list[Stage]()
    for position, (owner, (start, stop), (first, last), way) in enumerate(
        zip(copies.owners, ranges, pairwise(cuts), fits, strict=True)
    ):
        weights = costs.weights(first, last)
        beside = problem.beside(position, first, last) - (copies.versions[position] - 1) * weights + way.transient
        parts.append(
            Stage(
                stage=owner,
                first_node=start,
                last_node=stop - 1,
                forward_ms=costs.forward_ms(first, last),
                backward_ms=costs.backward_ms(first, last),
                extra_ms=way.extra_ms,
                peak_bytes_before=ceil(before[owner]),
                peak_bytes=ceil(after[owner]),
                recompute=tuple(nodes[node].name for node in way.recompute),
                swap=producers(way.swap),
                drop=producers(way.drop),
                swap_storages=way.swap,
                drop_storages=way.drop,
                kept_bytes=way.kept,
                weight_bytes=ceil(weights),
                beside_bytes=ceil(beside),
            )
        )
    longest = max(part.ms for part in parts)
    return Plan(
        search_ms=0.0,
        nodes_tried=0,
        max_stage_ms=longest,
        optimum_ms=longest,
        binary_ms=None,
        cuts=tuple(stop - 1 for _, stop in ranges[:-1]),
        stages=tuple(parts),
        origin=costs.profile.origin,
        **workload._asdict(),
        limit_bytes=problem.limit_bytes,
        optimize=problem.optimize,
        host_gbps=problem.host_gbps,
        model_bytes=sum(one.nbytes for one in costs.profile.parameters),
    )
