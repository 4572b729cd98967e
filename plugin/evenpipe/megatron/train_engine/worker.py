"""One training process: set up, iterate, and give its share of the result."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from evenpipe.megatron.train_engine.engines import engine_for
from evenpipe.megatron.train_engine.loop import Tell, Watched, iterate
from evenpipe.megatron.train_engine.saver import Saver, load
from evenpipe.megatron.train_engine.step import make_learner
from evenpipe.planner import PlanError
from evenpipe.runtime.exchange import Exchange
from evenpipe.train import data
from evenpipe.train.gather import Coordinates, Share, combine, digest, gather
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.recorder import Recorder
from evenpipe.train.result import RunResult
from evenpipe.train.stopping import Agreement, StopRequest
from evenpipe.train.whereabouts import Whereabouts

__all__ = ["run_case"]


def run_case(
    options: TrainOptions,
    device: torch.device,
    whereabouts: Whereabouts,
    tell: Tell,
    host_group: dist.ProcessGroup | None = None,
    stop: StopRequest | None = None,
) -> RunResult | None:
    """Train as `options` say; needs torch.distributed initialised with `options.world_size` processes.

    Leaves no Megatron state behind, so that other cases can follow. The result is returned on rank 0, None elsewhere.
    `host_group` holds all ranks and moves host memory; it may be left out where the default group does so.
    `stop` is needed with --save. Raises OptionsError when the data or the checkpoint cannot be read, and NotSaved.
    """
    corpus = data.load(options)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.stages,
        virtual_pipeline_model_parallel_size=options.chunks if options.chunks > 1 else None,
    )
    try:
        learner = make_learner(options, corpus, device)
        recorder = Recorder(whereabouts)
        note = tell.note if dist.get_rank() == 0 else _nothing
        with engine_for(learner, whereabouts.stage, recorder, note) as engine:
            watched = Watched(learner, engine, recorder, whereabouts)
            first = load(learner, engine, dist.get_rank(), note)
            if engine.adaptive is not None:
                engine.adaptive.iteration = first
            try:
                found = iterate(watched, first, _ending(watched, stop, host_group, tell), tell)
            except PlanError as error:
                given = "" if options.memory_gib is None else f" {options.memory_gib:g}"
                raise OptionsError(f"--memory-gib{given}: {error}") from None
        whereabouts.enter("gathering results")
        share = Share(_coordinates(), found, digest(learner.replica.chunks), recorder.unit_bytes, recorder.spans)
        shares = gather(share, host_group)
        return combine(shares) if shares is not None else None
    finally:
        parallel_state.destroy_model_parallel()


def _ending(
    watched: Watched, stop: StopRequest | None, host_group: dist.ProcessGroup | None, tell: Tell
) -> Callable[[int], bool]:
    """Called with how many iterations are done: saves when it is time to, and says whether the run is to end."""
    options, engine = watched.learner.options, watched.engine
    if options.save is None:
        return lambda done: done == options.iterations
    assert stop is not None, "a run that saves can be asked to stop"
    exchange = Exchange(dist.new_group(backend="gloo"), 1, torch.device("cpu"))
    group = host_group if host_group is not None else dist.group.WORLD
    assert group is not None
    saver = Saver(watched.learner, watched.whereabouts, Agreement(stop, exchange), group, tell.saved)
    return lambda done: saver.ends_after(done, engine)


def _nothing(text: str) -> None:
    """Somebody else tells it."""


def _coordinates() -> Coordinates:
    return Coordinates(
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
