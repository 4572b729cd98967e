"""The iterations of a run in one process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from evenpipe.megatron.adaptive.static_memory import static_bytes
from evenpipe.megatron.train_engine.engines import Engine
from evenpipe.megatron.train_engine.step import Learner, micro_batches, train_step
from evenpipe.schedule import FORWARD, Action
from evenpipe.train.gather import Found, Tuned, highest
from evenpipe.train.options import TrainOptions
from evenpipe.train.outcomes import Outcomes
from evenpipe.train.recorder import Recorder
from evenpipe.train.result import StageMeasurement
from evenpipe.train.whereabouts import Whereabouts

__all__ = ["Tell", "Watched", "iterate"]


class Tell(NamedTuple):
    """What to call while a run is under way.

    `iteration` with (iteration, loss, milliseconds) after each, by one process: the one that knows the loss; `saved`
    with the folder of a complete checkpoint, `note` with a line that the user should see, both on rank 0.
    """

    iteration: Callable[[int, float, float], None]
    saved: Callable[[Path], None]
    note: Callable[[str], None]


class Watched(NamedTuple):
    """A learner, and who watches it."""

    learner: Learner
    engine: Engine
    recorder: Recorder
    whereabouts: Whereabouts


def iterate(watched: Watched, first: int, ends_after: Callable[[int], bool], tell: Tell) -> Found:
    """All iterations from `first` on, or until `ends_after`, called with how many are done, says so.

    Nothing is under way when it returns. Raises FloatingPointError for a loss that is not finite, but in fp16, where
    the step is skipped.
    """
    learner, engine, recorder, whereabouts = watched
    streams = micro_batches(learner, first)
    losses: list[float] = []
    times: list[float] = []
    peaks: list[StageMeasurement] = []
    outcomes = Outcomes()
    for iteration in range(first, learner.options.iterations):
        whereabouts.start_iteration(iteration)
        engine.start_batch()
        engine.counter.reset_peak()
        recorder.start_batch()
        start = _clock(learner.device)
        stepped = train_step(learner, streams, whereabouts)
        times.append((_clock(learner.device) - start) * 1e3)
        if engine.extra is None:
            outcomes.file(iteration, stepped.updated, stepped.grad_norm)
        _file_finished(outcomes, engine, first)
        peaks.append(_measured(learner, engine))
        if stepped.reduced:
            losses.append(_loss(stepped.reduced, iteration, learner.options, whereabouts))
            mean = _over_replicas(losses[-1], learner.device)
            if parallel_state.get_data_parallel_rank() == 0 and parallel_state.get_tensor_model_parallel_rank() == 0:
                tell.iteration(iteration, mean, times[-1])
        if ends_after(iteration + 1):
            break
        _file_finished(outcomes, engine, first)
    if engine.extra is not None:
        engine.extra.drain()
    _file_finished(outcomes, engine, first)
    versions = 1 if engine.extra is None else engine.extra.versions_peak
    measured = highest(peaks)
    return Found(
        first, tuple(losses), tuple(times), measured, outcomes.grad_norms, outcomes.skipped, versions, _tuned(engine)
    )


def _tuned(engine: Engine) -> Tuned:
    if engine.adaptive is None or engine.adaptive.tuner is None:
        return Tuned()
    return Tuned(tuple(engine.adaptive.tuner.retunes), engine.adaptive.predicted_saved_bytes)


def _file_finished(outcomes: Outcomes, engine: Engine, first: int) -> None:
    """The step that was finished last: under the batch that it belongs to."""
    finished = engine.extra.finished if engine.extra is not None else None
    if finished is not None:
        outcomes.file(first + finished.batch, finished.updated, finished.grad_norm)


def _measured(learner: Learner, engine: Engine) -> StageMeasurement:
    held, extra = engine.counter.snapshot(), engine.extra
    parameters = [parameter for chunk in learner.replica.chunks for parameter in chunk.parameters()]
    parameter_bytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    return StageMeasurement(
        held.peak_units,
        held.peak_bytes,
        held.evicted_bytes,
        parameter_bytes,
        0 if extra is None else extra.weight_version_bytes,
        0 if extra is None else extra.held_gradient_bytes,
        static_bytes(learner.replica.chunks, learner.optimizer),
    )


def _loss(
    reduced: Sequence[dict[str, torch.Tensor]], iteration: int, options: TrainOptions, whereabouts: Whereabouts
) -> float:
    """The mean over the micro-batches of this replica."""
    values: list[float] = [total / count for total, count in (report["lm loss"].tolist() for report in reduced)]
    for micro_batch, value in enumerate(values):
        if options.precision != "fp16" and not math.isfinite(value):
            whereabouts.enter(str(Action(FORWARD, micro_batch, options.chunks - 1)))
            raise FloatingPointError(
                f"loss is {value} in iteration {iteration + 1}, micro-batch {micro_batch}: "
                "use a smaller --lr, a longer --lr-warmup, or --load from before it"
            )
    return sum(values) / len(values)


def _over_replicas(loss: float, device: torch.device) -> float:
    """The mean over data-parallel replicas, for the log."""
    mean = torch.tensor(loss, dtype=torch.float64, device=device)
    dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
    return mean.item() / int(parallel_state.get_data_parallel_world_size())


def _clock(device: torch.device) -> float:
    """Seconds, once the device has computed what it was told; transfers may still be under way."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()
