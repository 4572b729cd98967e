"""The estimate of a run before it runs: time, memory, warnings; the document ``evenpipe.estimate/1``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

from evenpipe.descriptions import Cluster, Device, Framework, Model, framework
from evenpipe.planner.advice import reason_of, warnings_of
from evenpipe.planner.beside_compute import beside_moves
from evenpipe.planner.counted_flops import logged_flops, model_flops
from evenpipe.planner.iteration import (
    PartTime,
    Simulated,
    batch_end,
    embeddings_end,
    message_bytes_of,
    part_times,
    simulated,
)
from evenpipe.planner.kernels import FITTED, Calibration
from evenpipe.planner.muon import orthogonalized
from evenpipe.planner.operations.operation import summed
from evenpipe.planner.operations.parts import Blocks, parts_of
from evenpipe.planner.possible import check
from evenpipe.planner.run import EstimateError, Run
from evenpipe.planner.searched_order import caps, searched_program
from evenpipe.planner.stage_bytes import Chunk, StageBytes, chunks_of, stage_bytes
from evenpipe.planner.stage_nodes import Placed, Positions, StageNodes, positions_of, slowest
from evenpipe.planner.uncertainty import Uncertainty, uncertainty_of
from evenpipe.schedule import SEARCHED, Link, Programs, Queues, ScheduleError, Size, partner
from evenpipe.simulate import Costs, Wire

__all__ = [
    "Estimate",
    "Estimator",
    "StageEstimate",
    "estimate",
    "framework_of",
]


_MS: Final = 1e3
_GIB: Final = 2**30


class StageEstimate(NamedTuple):
    """One GPU of one stage: bytes at its peak, and milliseconds that it computes for a micro-batch.

    ``eviction_ms``: what it would take to move a micro-batch's saved activations to the partner stage. ``lacking``:
    bytes that its device has less than the cluster's largest. ``nodes``: of an unlike cluster, those that it is on.
    """

    bytes: StageBytes
    forward_ms: float
    backward_ms: float
    eviction_ms: float
    lacking: int = 0
    nodes: str = ""


@dataclass(frozen=True)
class Estimate:
    """``reason``: why it does not fit and what to change, or None. ``mfu``: a fraction of the devices' rate.

    That rate is in FP8 or FP4 where products of linear layers are. ``logged_tflops``: 10^12 operations/s of a GPU, as
    Megatron-LM logs them. ``tokens_per_second``: of a GPU. ``run`` has the framework's defaults filled in.
    """

    fits: bool
    reason: str | None
    mfu: float
    logged_tflops: float
    iteration_ms: float
    samples_per_second: float
    tokens_per_second: float
    uncertainty: Uncertainty
    stages: tuple[StageEstimate, ...]
    warnings: tuple[str, ...]
    run: Run

    @property
    def fullest(self) -> StageEstimate:
        """Return the stage whose device has the least memory left."""
        return max(self.stages, key=lambda stage: stage.bytes.total + stage.lacking)

    def fullest_gib(self, device: Device) -> tuple[float, float]:
        """Return what the fullest stage needs, and what it has; ``device``: the cluster's largest."""
        return self.fullest.bytes.total / 2**30, device.memory_gib - self.fullest.lacking / 2**30

    def to_json(self) -> dict[str, Any]:
        """Return the document ``evenpipe.estimate/1``."""
        return {
            "format": "evenpipe.estimate/1",
            "fits": self.fits,
            "reason": self.reason,
            "mfu": self.mfu,
            "logged_tflops_per_gpu": self.logged_tflops,
            "iteration_ms": self.iteration_ms,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "uncertainty": self.uncertainty._asdict(),
            "stages": [
                {
                    "bytes": {**stage.bytes._asdict(), "total": stage.bytes.total},
                    "forward_ms": stage.forward_ms,
                    "backward_ms": stage.backward_ms,
                    **({"nodes": stage.nodes} if stage.nodes else {}),
                }
                for stage in self.stages
            ],
            "warnings": list(self.warnings),
        }


def framework_of(model: Model, cluster: Cluster) -> Framework:
    """Return what a run of the model on these devices is taken to be trained with, where nothing is said."""
    return framework(cluster.device.framework or model.framework)


def estimate(
    model: Model, cluster: Cluster, run: Run, of: Framework | None = None, calibration: Calibration = FITTED
) -> Estimate:
    """One estimate. Raises EstimateError for a run that cannot be."""
    return Estimator(model, cluster, of, calibration)(run)


class Estimator:
    """Estimates of runs of one model on one cluster; programs that several runs share are built once, and simulated
    once for the same costs.
    """

    def __init__(
        self, model: Model, cluster: Cluster, of: Framework | None = None, calibration: Calibration = FITTED
    ) -> None:
        self.model = model
        self.cluster = cluster
        self.framework = of or framework_of(model, cluster)
        self.calibration = calibration
        self._nodes = StageNodes(cluster)
        self._programs: dict[tuple[str, bool, Queues, bool], Programs] = {}
        self._simulated: dict[str, Simulated] = {}

    def __call__(self, run: Run) -> Estimate:
        """Raises EstimateError for a run that cannot be, with the argument and the remedy."""
        run = run.of(self.framework)
        check(run, self.model, self.cluster)
        programs, size = self._scheduled(run)
        if size.chunks != run.chunks:  # a schedule that has a number of its own
            run = replace(run, chunks=size.chunks)
            check(run, self.model, self.cluster)
        parts, blocks = parts_of(self.model, run), Blocks(self.model, run)
        chunks = chunks_of(parts, blocks)
        placed = Placed(run, self._nodes, self.calibration)
        places = programs.spec.places(size)
        where = positions_of(places)
        by_nodes = {
            groups: [beside_moves(part_times(parts, blocks, one), chunks, run, one) for one in placed.kernels(groups)]
            for groups in set(placed.groups)
        }
        times = [slowest([each[n] for each in by_nodes[placed.groups[stage]]]) for n, stage in enumerate(where.stages)]
        own_chunks = [[chunks[n] for n in at] for at in where.at]
        units = [[round(chunk.kept_bytes) for chunk in row] for row in own_chunks]
        left = [[round(chunk.left_bytes) for chunk in row] for row in own_chunks]
        message_bytes = message_bytes_of(self.model, run)
        evictions = [_eviction(placed, stage, max(row), run) for stage, row in enumerate(units)]
        costs, own = self._costs(run, times, where, placed, evictions)
        devices = [self._nodes.device(groups) for groups in placed.groups]
        room: list[int] = []
        if programs.spec.name == SEARCHED:
            rows = [(held,) * places.stages for held in (0, _GIB)]
            none, some = (stage_bytes(chunks, row, places, 1, run, message_bytes, devices) for row in rows)
            room = caps(none, some, devices)
        same = repr((programs.spec.name, run.overlap_experts, run.bpipe, run.queues, size, costs, units, left, room))
        if room and same not in self._simulated:
            programs = Programs(programs.spec, queues=run.queues)
            programs.keep(size, searched_program(run, where, costs, units, left, room))
        try:
            found = self._simulated.get(same) or simulated(programs, size, costs, units, left)
        except ScheduleError as error:
            raise EstimateError(str(error)) from error
        self._simulated[same] = found
        held = stage_bytes(chunks, found.saved_bytes, places, found.weight_versions, run, message_bytes, devices)
        ends = [self._end(stage, run, own_chunks[stage], where, placed, own[stage]) for stage in range(places.stages)]
        if run.optimizer == "muon":
            ends = [
                end + max(orthogonalized([parts[n] for n in at], blocks, run, one) for one in placed.kernels(groups))
                for end, at, groups in zip(ends, where.at, placed.groups, strict=True)
            ]
        iteration_ms = found.makespan_ms + max(ends) * _MS
        stages = tuple(
            StageEstimate(nbytes, *ms, sum(wire), self._nodes.lacking(groups), self._nodes.names(groups))
            for nbytes, ms, wire, groups in zip(held, own, evictions, placed.groups, strict=True)
        )
        flops = sum(kind.device.tflops[run.rate] * 1e12 * kind.gpus for kind in self.cluster.kinds)
        gpu_seconds = iteration_ms / _MS * run.gpus
        return Estimate(
            fits=all(each.total <= of.memory_gib * 2**30 for each, of in zip(held, devices, strict=True)),
            reason=reason_of(held, devices, run),
            mfu=model_flops(self.model, run) / (iteration_ms / _MS * flops),
            logged_tflops=logged_flops(self.model, run) / gpu_seconds / 1e12,
            iteration_ms=iteration_ms,
            samples_per_second=run.global_batch / (iteration_ms / _MS),
            tokens_per_second=run.global_batch * self.model.sequence / gpu_seconds,
            uncertainty=uncertainty_of(self.model, self.cluster, self.framework, run),
            stages=stages,
            warnings=tuple(
                warnings_of(
                    self.model,
                    self.cluster,
                    run,
                    held,
                    devices,
                    own,
                    max(chunk.working_bytes for chunk in chunks),
                    sum(evictions[0]),
                )
            ),
            run=run,
        )

    def _scheduled(self, run: Run) -> tuple[Programs, Size]:
        """Return the schedule's programs, and the size to build."""
        try:
            spec = replace(run.spec, fused=False)  # what two passes hide of each other is in their times
            batches = 3 if "stream" in spec.needs else 1
            size = spec.fitted(Size(run.stages, run.micro_batches, run.chunks, run.group_size, batches))
            key = spec.name, run.bpipe, run.queues, run.overlap_experts
            if key not in self._programs:
                self._programs[key] = Programs(spec, run.bpipe, run.queues)
            return self._programs[key], size
        except ScheduleError as error:
            raise EstimateError(str(error)) from error

    def _end(
        self,
        stage: int,
        run: Run,
        chunks: Sequence[Chunk],
        where: Positions,
        placed: Placed,
        own_ms: tuple[float, float],
    ) -> float:
        """Return seconds of the stage after its last micro-batch."""
        parameters = summed(chunk.parameters for chunk in chunks)
        forward, backward = (ms / _MS for ms in own_ms)
        end = max(batch_end(parameters, run, one, forward, backward) for one in placed.kernels(placed.groups[stage]))
        ends = where.stages[0], where.stages[-1]
        copied = self.model.tied and stage in ends and ends[0] != ends[1]
        embedding = self.model.vocabulary * self.model.hidden / run.tensor if copied else 0
        return end + max(embeddings_end(embedding, run, one.links) for one in placed.between(*ends))

    def _costs(
        self, run: Run, times: Sequence[PartTime], where: Positions, placed: Placed, evictions: Sequence[Wire]
    ) -> tuple[Costs, list[tuple[float, float]]]:
        """Return what the simulator is told, and per stage what it computes alone, forward and backward."""
        own, busy, weights = [], [], []
        hops = [hop for hop in pairwise(where.stages) if hop[0] != hop[1]]
        over = {hop: placed.hand_over(self.model, run, *hop) for hop in dict.fromkeys(hops)}
        for stage, positions in enumerate(where.at):
            forward, backward, late = (_MS * sum(times[n][field] for n in positions) for field in range(3))
            own.append((forward, backward))
            weights.append(late)
            sends = Counter(over[hop].wait_ms for hop in hops if hop[0] == stage)
            returns = Counter(over[hop].wait_ms for hop in hops if hop[1] == stage)
            busy.append((forward + _total(sends), backward + _total(returns)))
        links = {Link("forward", *hop): Wire(*one[:2]) for hop, one in over.items()}
        links |= {Link("backward", *hop[::-1]): Wire(*one[:2]) for hop, one in over.items()}
        usual = next(iter(links.values()), Wire())
        costs = Costs(
            forward_ms=tuple(forward for forward, _ in busy),
            backward_ms=tuple(backward for _, backward in busy),
            wires={"forward": usual, "backward": usual},
            links={link: wire for link, wire in links.items() if wire != usual}
            | (dict(_moves(evictions)) if run.bpipe else {}),
            synchronous_transfers=run.synchronous_transfers,
            weight_gradient_ms=tuple(weights),
        )
        return costs, own


def _total(waits: Counter[float]) -> float:
    return sum(count * wait for wait, count in waits.items())


def _eviction(placed: Placed, stage: int, nbytes: float, run: Run) -> Wire:
    """Return what it takes to move so many bytes to the partner stage."""
    ways = [one.links.eviction(nbytes) for one in placed.between(stage, partner(stage, run.stages))]
    return Wire(*(_MS * max(each) for each in zip(*ways, strict=True)))


def _moves(evictions: Sequence[Wire]) -> Iterator[tuple[Link, Wire]]:
    """Both ways between the stages of each pair; what moves is the evictor's, which is the earlier one."""
    for stage, wire in enumerate(evictions[: len(evictions) // 2]):
        other = partner(stage, len(evictions))
        yield Link("evict", stage, other), wire
        yield Link("load", other, stage), wire
