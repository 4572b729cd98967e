"""One training process: set up, iterate, and give its share of the result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from evenpipe.megatron.trainer import data
from evenpipe.megatron.trainer.engines import Engine, engine_for
from evenpipe.megatron.trainer.gather import Coordinates, Share, combine, digest, gather
from evenpipe.megatron.trainer.options import TrainOptions
from evenpipe.megatron.trainer.recorder import Recorder
from evenpipe.megatron.trainer.result import RunResult, StageMeasurement
from evenpipe.megatron.trainer.step import Learner, make_learner, train_step
from evenpipe.megatron.trainer.whereabouts import Whereabouts

__all__ = ["Tell", "run_case"]

Tell = Callable[[int, float, float], None]
"""Called with (iteration, loss, milliseconds) after each iteration, by one process: the one that knows the loss."""


class _Watched(NamedTuple):
    """A learner, and who watches it."""

    learner: Learner
    engine: Engine
    recorder: Recorder
    whereabouts: Whereabouts


def run_case(
    options: TrainOptions,
    device: torch.device,
    whereabouts: Whereabouts,
    tell: Tell,
    host_group: dist.ProcessGroup | None = None,
) -> RunResult | None:
    """Train as `options` say; needs torch.distributed initialised with `options.world_size` processes.

    Leaves no Megatron state behind, so that other cases can follow. The result is returned on rank 0, None elsewhere.
    `host_group` holds all ranks and moves host memory; it may be left out where the default group does so.
    Raises OptionsError when the data cannot be read.
    """
    corpus = data.load(options)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.stages,
        virtual_pipeline_model_parallel_size=options.chunks if options.chunks > 1 else None,
    )
    try:
        learner = make_learner(options, corpus, device)
        chunks = learner.replica.chunks
        recorder = Recorder(whereabouts)
        with engine_for(options, whereabouts.stage, chunks, recorder) as engine:
            losses, times, measured = _iterate(_Watched(learner, engine, recorder, whereabouts), tell)
        whereabouts.enter("gathering results")
        weights = digest(chunks)
        share = Share(_coordinates(), losses, weights, times, measured, recorder.unit_bytes, recorder.spans)
        shares = gather(share, host_group)
        return combine(shares) if shares is not None else None
    finally:
        parallel_state.destroy_model_parallel()


def _coordinates() -> Coordinates:
    return Coordinates(
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )


def _iterate(watched: _Watched, tell: Tell) -> tuple[tuple[float, ...], tuple[float, ...], StageMeasurement]:
    """All iterations: this replica's losses (none but on the last stage), times in milliseconds, and peaks."""
    learner, engine, recorder, whereabouts = watched
    losses: list[float] = []
    times: list[float] = []
    peaks: list[StageMeasurement] = []
    for iteration in range(learner.options.iterations):
        whereabouts.start_iteration(iteration)
        engine.start_batch()
        engine.counter.reset_peak()
        recorder.start_batch()
        start = _clock(learner.device)
        reduced = train_step(learner, iteration, before_update=lambda: whereabouts.enter("optimizer step"))
        times.append((_clock(learner.device) - start) * 1e3)
        held = engine.counter.snapshot()
        peaks.append(StageMeasurement(held.peak_units, held.peak_bytes, held.evicted_bytes))
        if reduced:
            values = [total / count for total, count in (report["lm loss"].tolist() for report in reduced)]
            losses.append(sum(values) / len(values))
            mean = _over_replicas(losses[-1], learner.device)
            if parallel_state.get_data_parallel_rank() == 0 and parallel_state.get_tensor_model_parallel_rank() == 0:
                tell(iteration, mean, times[-1])
    return tuple(losses), tuple(times), StageMeasurement(*map(max, zip(*peaks, strict=True)))


def _over_replicas(loss: float, device: torch.device) -> float:
    """The mean over data-parallel replicas, for the log."""
    mean = torch.tensor(loss, dtype=torch.float64, device=device)
    dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
    return mean.item() / int(parallel_state.get_data_parallel_world_size())


def _clock(device: torch.device) -> float:
    """Seconds, once the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
