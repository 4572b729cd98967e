"""Puts together what the processes of a run found."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist

from evenpipe.simulate import MemoryPoint, Span
from evenpipe.train.engine import Coordinates, Tuned
from evenpipe.train.result import RunResult, StageMeasurement

__all__ = ["Found", "Share", "combine", "digest", "gather", "highest"]


class Found(NamedTuple):
    """What one process saw of the iterations from `first` on.

    `losses` is empty but where the model ends; `grad_norms` and `skipped` are as in RunResult, and the same everywhere.
    """

    first: int
    losses: tuple[float, ...]
    iteration_ms: tuple[float, ...]
    measured: StageMeasurement
    grad_norms: tuple[float | None, ...]
    skipped: tuple[int, ...]
    weight_versions: int
    tuned: Tuned


class Share(NamedTuple):
    """What one process has to say of the run; spans and memory are in ms of a clock common to all."""

    at: Coordinates
    found: Found
    weights: dict[tuple[int, int], str]
    unit_bytes: tuple[int, ...]
    spans: tuple[Span, ...]
    memory: tuple[MemoryPoint, ...]


def digest(
    chunks: Iterable[torch.nn.Module], counts: Callable[[torch.nn.Parameter], bool] = lambda parameter: True
) -> str:
    """SHA-256 over the parameters of one process that count, by chunk and name; their names, shapes and bytes."""
    sha = hashlib.sha256()
    for number, chunk in enumerate(chunks):
        for name, parameter in sorted(chunk.named_parameters()):
            if not counts(parameter):
                continue
            sha.update(f"{number} {name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
            sha.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def gather(share: Share, group: dist.ProcessGroup | None) -> list[Share] | None:
    """Every process' share, in order of rank, on rank 0; None elsewhere. `group` must move host memory."""
    world = dist.get_world_size()
    shares: list[Share] | None = [share] * world if dist.get_rank() == 0 else None
    dist.gather_object(share, shares, dst=0, group=group)
    return shares


def combine(shares: Sequence[Share]) -> RunResult:
    """One result from all shares. Raises RuntimeError when data-parallel replicas ended with different weights."""
    stages = 1 + max(share.at.stage for share in shares)
    by_stage = [[share for share in shares if share.at.stage == stage] for stage in range(stages)]
    ending = [share.found for share in shares if share.found.losses and share.at.shard == 0]
    first_replica = sorted((share for share in shares if share.at.replica == share.at.shard == 0), key=attrgetter("at"))
    start = min((span.start_ms for share in first_replica for span in share.spans), default=0.0)
    return RunResult(
        losses=tuple(map(_mean, zip(*(found.losses for found in ending), strict=True))),
        weights_sha256=_weights(shares),
        iteration_ms=tuple(map(max, zip(*(share.found.iteration_ms for share in shares), strict=True))),
        stages=tuple(highest(share.found.measured for share in row) for row in by_stage),
        unit_bytes=tuple(share.unit_bytes for share in first_replica),
        spans=tuple(_spans_from(start, share.spans) for share in first_replica),
        memory=tuple(_memory_from(start, share.memory) for share in first_replica),
        first_iteration=ending[0].first,
        grad_norms=ending[0].grad_norms,
        skipped_iterations=ending[0].skipped,
        weight_versions_peak=max(share.found.weight_versions for share in shares),
        retunes=ending[0].tuned.retunes,
        predicted_saved_bytes=ending[0].tuned.predicted_saved_bytes,
    )


def highest(measurements: Iterable[StageMeasurement]) -> StageMeasurement:
    """Of each figure the highest."""
    return StageMeasurement(*map(max, zip(*measurements, strict=True)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _weights(shares: Sequence[Share]) -> str:
    known: dict[tuple[int, int], str] = {}
    for share in sorted(shares, key=attrgetter("at")):
        if any(known.setdefault(where, weights) != weights for where, weights in share.weights.items()):
            raise RuntimeError(
                f"stage {share.at.stage}, tensor-parallel rank {share.at.shard}: "
                f"data-parallel replicas 0 and {share.at.replica} ended with different weights"
            )
    return hashlib.sha256("".join(weights for _, weights in sorted(known.items())).encode()).hexdigest()


def _spans_from(start: float, spans: Sequence[Span]) -> tuple[Span, ...]:
    """In order of their start, counted from `start`."""
    ordered = sorted(spans, key=attrgetter("start_ms"))
    return tuple(Span(s.action, s.start_ms - start, s.end_ms - start) for s in ordered)


def _memory_from(start: float, memory: Sequence[MemoryPoint]) -> tuple[MemoryPoint, ...]:
    """Counted from `start`. Before its batch a stage holds what the batch before has left it."""
    counted = [point._replace(at_ms=max(0.0, point.at_ms - start)) for point in memory]
    return tuple(point._replace(at_ms=0.0) if number == 0 else point for number, point in enumerate(counted))
