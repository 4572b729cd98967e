"""Check what is between the ranks of a job: their clocks, and links between stages that would trade activations."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from evenpipe.doctor.finding import (
    Check,
    Finding,
    Reported,
    Verdict,
    by_finding,
    fine,
    noted,
    problem,
    run_checks,
    unseen,
)
from evenpipe.doctor.job import Job, Launched, NoMeetingError, meet
from evenpipe.report.bandwidth import ModelShape, Recompute
from evenpipe.runtime.placement import Coordinate, place

__all__ = ["Pipelines", "Together", "Wanted", "clocks", "gather_findings"]

_ROUND_TRIPS = 5
_NOTABLE_SECONDS = 0.1
_WRONG_SECONDS = 1.0


@dataclass(frozen=True)
class Wanted:
    """How the job's ranks are to be divided, and what for; ``shape`` None: no need is known."""

    stages: int | None
    tensor: int
    shape: ModelShape | None
    micro_batch_size: int
    recompute: Recompute


@dataclass(frozen=True)
class Pipelines:
    """Where the ranks of a job sit: the coordinate of each, in the order of the launcher."""

    stages: int
    coordinates: tuple[Coordinate, ...]
    placed: bool

    @classmethod
    def of(cls, wanted: Wanted, job: Mapping[int, Launched]) -> Pipelines:
        """As EvenPipe would place them or, where it cannot, as Megatron counts. Raises ValueError where none fit."""
        world, tensor = len(job), wanted.tensor
        stages = wanted.stages or world // tensor
        if stages < 1 or world % (stages * tensor):
            raise ValueError(
                f"{world} ranks are not a multiple of {stages} stages x {tensor} tensor-parallel ranks: "
                "give --stages and --tensor-parallel as in the run"
            )
        replicas = world // (stages * tensor)
        if _node_by_node(job):
            try:
                return cls(stages, place(stages, tensor, replicas, job[0].per_node).slots, True)
            except ValueError:
                pass
        return cls(stages, _in_megatrons_order(stages, replicas, tensor), False)

    def pipeline_of(self, rank: int) -> list[int]:
        """Return the ranks of the pipeline that ``rank`` is in, by stage."""
        _, dp, tp = self.coordinates[rank]
        ranks = {one.pp: rank for rank, one in enumerate(self.coordinates) if (one.dp, one.tp) == (dp, tp)}
        return [ranks[stage] for stage in range(self.stages)]

    def trading(self) -> list[tuple[int, int, int]]:
        """Stage of each evictor, its rank, its acceptor's."""
        found = []
        for rank, (stage, _, _) in enumerate(self.coordinates):
            if stage < self.stages // 2:
                found.append((stage, rank, self.pipeline_of(rank)[self.stages - 1 - stage]))
        return sorted(found)


def _node_by_node(job: Mapping[int, Launched]) -> bool:
    nodes = [job[rank].node for rank in sorted(job)]
    return all(nodes[rank] == nodes[rank - rank % job[0].per_node] for rank in range(len(nodes)))


def _in_megatrons_order(stages: int, replicas: int, tensor: int) -> tuple[Coordinate, ...]:
    return tuple(Coordinate(s, d, t) for s in range(stages) for d in range(replicas) for t in range(tensor))


def _crossing(pipelines: Pipelines, job: Mapping[int, Launched]) -> list[tuple[int, int, int]]:
    """Return the entries of `trading` whose ranks are on different nodes."""
    return [pair for pair in pipelines.trading() if job[pair[1]].node != job[pair[2]].node]


def _pairs(pipelines: Pipelines, job: Mapping[int, Launched]) -> Finding:
    """Return which of BPipe's pairs cross nodes, as EvenPipe places ranks and as the launcher does."""
    trading, stages = pipelines.trading(), pipelines.stages
    if not trading:
        return unseen("BPipe pairs", "one stage: nothing is traded")
    nodes, far = len({one.node for one in job.values()}), _crossing(pipelines, job)
    replicas, tensor = (1 + max(one[place] for one in pipelines.coordinates) for place in (1, 2))
    plain = _crossing(Pipelines(stages, _in_megatrons_order(stages, replicas, tensor), False), job)
    how = "placed pair-adjacent" if pipelines.placed else "in the launcher's order, as they cannot be placed"
    said = (
        f"{len(far)} of {len(trading)} cross nodes ({how}; {len(plain)} in Megatron's order, "
        f"{stages} stages on {nodes} {'node' if nodes == 1 else 'nodes'})"
    )
    if not far:
        return fine("BPipe pairs", said)
    listed = ", ".join(f"{stage}-{stages - 1 - stage} (ranks {a} and {b})" for stage, a, b in far[:4])
    remedy = None if pipelines.placed else "start as many ranks on every node, so that two stages' groups fit one"
    return noted("BPipe pairs", f"{said}: stages {listed}", remedy)


def clocks(rank: int, world: int) -> list[Finding]:
    """On rank 0: how far others' wall clocks are off, by half of the quickest round trip. Elsewhere: nothing."""
    import torch
    import torch.distributed as dist

    told = torch.zeros(1, dtype=torch.float64)
    if rank != 0:
        for _ in range(_ROUND_TRIPS):
            dist.recv(told, 0)
            dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
        return []
    off = {}
    for other in range(1, world):
        trips = []
        for _ in range(_ROUND_TRIPS):
            start, began = time.time(), time.perf_counter()
            dist.send(told, other)
            dist.recv(told, other)
            taken = time.perf_counter() - began
            trips.append((taken, float(told) - start - taken / 2))
        off[other] = min(trips)[1]
    worst = max(off, key=lambda other: abs(off[other]))
    said = f"the clock of rank {worst} is {off[worst] * 1e3:+,.1f} ms off rank 0's, the most of all"
    if abs(off[worst]) > _WRONG_SECONDS:
        remedy = "run chrony or another NTP client on every host: logs and traces do not fit together"
        return [problem("clocks", said, remedy)]
    return [(noted if abs(off[worst]) > _NOTABLE_SECONDS else fine)("clocks", said)]


@dataclass(frozen=True)
class Measured:
    """A rank's measurements: GB/s at which it sends on its own link to its partner, and its compute speed, if asked."""

    gbps: float | None
    flops: float | None
    device: str


def _measure_link(rank: int, pipelines: Pipelines, wanted: Wanted) -> Measured:
    """All ranks alike, once torch.distributed has been started; opens links, and closes them again."""
    import torch

    from evenpipe.runtime.connections import connect
    from evenpipe.runtime.timing import matrix_flops, sending_gbps
    from evenpipe.schedule import links, loop

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    ranks = pipelines.pipeline_of(rank)
    joined = [link for link in links(loop(len(ranks)), True) if link.kind in ("evict", "load")]
    connections = connect(ranks, joined, "nccl" if on_gpu else "gloo", device)
    try:
        gbps = sending_gbps(connections, ranks.index(rank), device)
    finally:
        connections.close()
    flops = None
    if wanted.shape is not None:
        rows = min(wanted.shape.sequence_length * wanted.micro_batch_size, 4096)
        columns = min(4 * wanted.shape.hidden // wanted.tensor, 4096)
        flops = matrix_flops(device, torch.bfloat16, rows, wanted.shape.hidden, columns)
    return Measured(gbps, flops, device.type)


def _verdicts(
    pipelines: Pipelines, job: Mapping[int, Launched], wanted: Wanted, measured: Mapping[int, Measured]
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """On the rank that reports: what links carry against what BPipe needs, and a row a pair."""
    from statistics import median

    from evenpipe.report.bandwidth import MeasuredPair, bandwidth_warnings, estimated_need

    need = None
    rates = [one.flops for one in measured.values() if one.flops is not None]
    if wanted.shape is not None and rates:
        need = estimated_need(
            wanted.shape,
            pipelines.stages,
            wanted.tensor,
            wanted.micro_batch_size,
            wanted.recompute,
            sequence_parallel=wanted.tensor > 1,
            fp32=False,
            flops=median(rates),
        )
    rows, found = [], []
    for stage, evictor, acceptor in pipelines.trading():
        gbps = min(measured[one].gbps or 0.0 for one in (evictor, acceptor))
        pair = MeasuredPair(stage, pipelines.stages - 1 - stage, job[evictor].node != job[acceptor].node, gbps)
        found.append(pair)
        rows.append(
            {
                "stages": [pair.evictor, pair.acceptor],
                "ranks": [evictor, acceptor],
                "crosses_nodes": pair.crosses_nodes,
                "gbps": gbps,
                "needs_gbps": None if need is None else need.strict_gbps * 2 / 3,
                "hides_all_gbps": None if need is None else need.strict_gbps,
            }
        )
    if not found:
        return [unseen("links", "one stage: no links between partners")], rows
    slowest = min(found, key=lambda pair: pair.gbps)
    over = "NCCL" if next(iter(measured.values())).device == "cuda" else "gloo, on CPUs"
    said = (
        f"{slowest.gbps:.2f} GB/s over {over} between stages {slowest.evictor} and {slowest.acceptor}, the slowest pair"
    )
    if need is None:
        return [noted("links", f"{said}; without --model, what BPipe needs is not known")], rows
    asked = f"needs {need.strict_gbps * 2 / 3:.2f} GB/s (BPipe, equations 10 to 12): {need.origin}"
    remedy = "recompute more, or use faster links"
    slow = bandwidth_warnings(found, need.strict_gbps, across_nodes=remedy, within_nodes=remedy)
    if not slow:
        return [fine("links", f"{said}; {asked}")], rows
    late = any(pair.gbps < need.strict_gbps * 2 / 3 for pair in found)
    lines = [line.rpartition("; ") for line in slow]
    return [(problem if late else noted)("links", f"{line}; {asked}", what) for line, _, what in lines], rows


def _start_group(store: Any, launched: Launched, seconds: float) -> None:
    """torch.distributed, over gloo; NCCL where there are GPUs. Ranks wait so long for each other, and no longer."""
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(launched.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, store=store, rank=launched.rank, world_size=launched.world, timeout=timedelta(seconds=seconds)
    )


def _named(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 2 and 5"."""
    listed = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        listed.append(f"{len(ranks) - 8} more")
    head = ", ".join(listed[:-1])
    return f"rank {listed[0]}" if len(ranks) == 1 else f"ranks {head} and {listed[-1]}"


class Together:
    """The findings of all ranks of ``job``, once they have met; ``rows`` has one a pair."""

    def __init__(self, launched: Launched, wanted: Wanted, limit_s: float) -> None:
        self._launched, self._wanted, self._limit_s = launched, wanted, limit_s
        self.job: Job | None = None
        self.rows: list[dict[str, Any]] = []

    def meet(self) -> Iterator[Finding]:
        """Find the other ranks; where all have come, measure what joins them."""
        launched = self._launched
        try:
            job = Job(meet(os.environ, launched, self._limit_s), launched, self._limit_s)
        except NoMeetingError as error:
            yield problem("ranks", str(error), error.remedy)
            return
        except ImportError as error:
            yield unseen("ranks", f"torch.distributed cannot be imported: {error}")
            return
        self.job = job
        if job.missing:
            said = f"{_named(job.missing)} of {launched.world} {'has' if len(job.missing) == 1 else 'have'} not come"
            yield problem("ranks", said, "see whether that process was started, and reaches MASTER_ADDR:MASTER_PORT")
        elif not job.agree():
            yield problem("ranks", "not all ranks see all others", "start the doctor again")
        else:
            yield from self._measure(job)

    def _measure(self, job: Job) -> Iterator[Finding]:
        try:
            pipelines = Pipelines.of(self._wanted, job.present)
        except ValueError as error:
            yield problem("BPipe pairs", str(error), "correct --stages or --tensor-parallel")
            return
        if job.reports:
            yield _pairs(pipelines, job.present)
        remedy = (
            "see that no firewall is between nodes, and that NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name the "
            "network they share"
        )
        waits_for = "ranks that this one is connected with"
        found, _ = run_checks(
            [Check("links", lambda: self._links(job, pipelines), 2 * self._limit_s, waits_for, remedy)]
        )
        yield from found

    def _links(self, job: Job, pipelines: Pipelines) -> Iterator[Finding]:
        launched = self._launched
        _start_group(meet(os.environ, launched, self._limit_s, "group"), launched, self._limit_s)
        yield from clocks(launched.rank, launched.world)
        mine = _measure_link(launched.rank, pipelines, self._wanted)
        measured = job.gather("measured", dataclasses.astuple(mine), self._limit_s)
        if job.reports and len(measured) == launched.world:
            of_rank = {rank: Measured(*each) for rank, each in measured.items()}
            found, self.rows = _verdicts(pipelines, job.present, self._wanted, of_rank)
            yield from found


def gather_findings(job: Job, found: list[Finding], seconds: float) -> list[Reported]:
    """Return, on the rank that reports, what all ranks have found, and which have not answered in time."""
    sent = job.gather("report", [(check, verdict.value, *rest) for check, verdict, *rest in found], seconds)
    reported = by_finding(
        {
            rank: [Finding(check, Verdict(verdict), *rest) for check, verdict, *rest in each]
            for rank, each in sent.items()
        }
    )
    silent = [rank for rank in job.present if rank not in sent]
    if silent and job.reports:
        said = f"{_named(silent)} came, and then said nothing for {seconds:g} s"
        finding = problem("ranks", said, "see what that process is doing (py-spy dump --pid)")
        reported.append(Reported(finding, tuple(silent)))
    return reported
