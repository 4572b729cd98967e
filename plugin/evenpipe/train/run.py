"""One training run in one of its processes: the iterations, its share of the result, and all shares as one."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist

from evenpipe.runtime.exchange import Exchange
from evenpipe.runtime.heartbeat import job_timeout
from evenpipe.schedule import FORWARD, Action
from evenpipe.simulate import MemoryPoint, Span
from evenpipe.train import data
from evenpipe.train.engine import (
    Case,
    Coordinates,
    Engine,
    FailureContext,
    OptimizerStep,
    Recorder,
    Tuned,
    engine_module,
)
from evenpipe.train.options import TrainOptions
from evenpipe.train.result import Iteration, Note, Report, RunResult, Saved, StageMeasurement
from evenpipe.train.saver import Agreement, Saver, StopRequest, load

__all__ = ["Measured", "Share", "combine", "digest", "gather", "iterate", "run_case"]

Tell = Callable[[Report], None]


class Measured(NamedTuple):
    """The measurements of one process in the iterations from `first` on.

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
    """The report of one process on the run; spans and memory are in ms of a clock common to all."""

    at: Coordinates
    found: Measured
    weights: dict[tuple[int, int], str]
    unit_bytes: tuple[int, ...]
    left_bytes: tuple[int, ...]
    spans: tuple[Span, ...]
    memory: tuple[MemoryPoint, ...]

    @classmethod
    def of(cls, engine: Engine, found: Measured, recorder: Recorder) -> Share:
        """Return this process' share, after its last iteration."""
        held = recorder.unit_bytes, recorder.left_bytes
        return cls(engine.coordinates, found, engine.weights(), *held, recorder.spans, recorder.memory)


def run_case(
    options: TrainOptions,
    device: torch.device,
    failure: FailureContext,
    tell: Tell,
    host_group: dist.ProcessGroup | None = None,
    stop: StopRequest | None = None,
    run: str = "",
) -> RunResult | None:
    """Train as `options` say; needs torch.distributed initialised with `options.world_size` processes.

    Leaves nothing of the engine behind, so that other cases can follow. The result is returned on rank 0, None
    elsewhere. `tell` is given what is to be reported. `host_group` holds all ranks and moves host memory; it may be
    left out where the default group does so. `stop`, and `run`, the owner of its folder, are needed with --save. Raises
    OptionsError when the data or the checkpoint cannot be read, and NotSaved.
    """
    rank, recorder = dist.get_rank(), Recorder(failure)

    def note(text: str) -> None:
        if rank == 0:
            tell(Note(text))

    case = Case(options, data.load(options), device, failure, recorder, note)
    with engine_module(options.engine).opened(case) as engine:
        recorder.watch(lambda: engine.counter)
        first = load(options, engine, host_group, note)
        engine.begin(first)
        found = iterate(case, engine, first, _ending(case, engine, stop, run, host_group, tell), tell)
        failure.enter("gathering results")
        shares = gather(Share.of(engine, found, recorder), host_group)
    return combine(shares) if shares is not None else None


def iterate(case: Case, engine: Engine, first: int, ends_after: Callable[[int], bool], tell: Tell) -> Measured:
    """All iterations from `first` on, or until `ends_after`, called with how many are done, says so.

    Nothing is under way when it returns. Raises FloatingPointError for a loss that is not finite, but in fp16, where
    the step is skipped.
    """
    losses: list[float] = []
    times: list[float] = []
    peaks: list[StageMeasurement] = []
    # By iteration: a step may be known late, or told more often than once.
    steps: dict[int, OptimizerStep] = {}
    for iteration in range(first, case.options.iterations):
        case.failure.start_iteration(iteration)
        engine.counter.reset_peak()
        case.recorder.start_batch()
        start = _clock(case.device)
        of_micro_batches = engine.train(iteration)
        times.append((_clock(case.device) - start) * 1e3)
        _note_step(steps, engine)
        held = engine.counter
        peaks.append(StageMeasurement(held.peak_units, held.peak_bytes, held.evicted_bytes, *engine.kept_bytes()))
        if of_micro_batches:
            losses.append(_loss(of_micro_batches, iteration, case))
            mean = _over_replicas(losses[-1], engine.replicas, case.device)
            if engine.coordinates.replica == engine.coordinates.shard == 0:
                tell(Iteration(iteration, mean, times[-1]))
        if ends_after(iteration + 1):
            break
        _note_step(steps, engine)
    engine.drain()
    _note_step(steps, engine)
    in_order = [step for _, step in sorted(steps.items())]
    return Measured(
        first=first,
        losses=tuple(losses),
        iteration_ms=tuple(times),
        measured=highest(peaks),
        grad_norms=tuple(step.grad_norm if step.updated else None for step in in_order),
        skipped=tuple(step.iteration for step in in_order if not step.updated),
        weight_versions=engine.versions_peak,
        tuned=engine.tuned,
    )


def _note_step(steps: dict[int, OptimizerStep], engine: Engine) -> None:
    if engine.finished is not None:
        steps[engine.finished.iteration] = engine.finished


def _ending(
    case: Case,
    engine: Engine,
    stop: StopRequest | None,
    run: str,
    host_group: dist.ProcessGroup | None,
    tell: Tell,
) -> Callable[[int], bool]:
    """Called with how many iterations are done: saves when it is time to, and says whether the run is to end."""
    if case.options.save is None:
        return lambda done: done == case.options.iterations
    assert stop is not None, "a run that saves can be asked to stop"
    exchange = Exchange(dist.new_group(backend="gloo", timeout=job_timeout()), 1, torch.device("cpu"))
    group = host_group if host_group is not None else dist.group.WORLD
    assert group is not None
    return Saver(case, engine, Agreement(stop, exchange), group, run, lambda folder: tell(Saved(folder))).ends_after


def _loss(of_micro_batches: Sequence[float], iteration: int, case: Case) -> float:
    """Return the mean over the micro-batches of this replica."""
    for micro_batch, value in enumerate(of_micro_batches):
        if case.options.precision != "fp16" and not math.isfinite(value):
            case.failure.enter(str(Action(FORWARD, micro_batch, case.options.plan.places.last.chunk)))
            raise FloatingPointError(
                f"loss is {value} in iteration {iteration + 1}, micro-batch {micro_batch}: "
                "use a smaller --lr, a longer --lr-warmup, or --load from before it"
            )
    return sum(of_micro_batches) / len(of_micro_batches)


def _over_replicas(loss: float, replicas: dist.ProcessGroup, device: torch.device) -> float:
    """Return the mean over data-parallel replicas, for the log."""
    mean = torch.tensor(loss, dtype=torch.float64, device=device)
    dist.all_reduce(mean, group=replicas)
    return mean.item() / replicas.size()


def _clock(device: torch.device) -> float:
    """Return seconds, once the device has computed what it was told; transfers may still be under way."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


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
    """Return every process' share, in order of rank, on rank 0; None elsewhere. `group` must move host memory."""
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
        left_bytes=tuple(share.left_bytes for share in first_replica),
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
    """Return the highest value of each figure."""
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
