"""One training process: set up, iterate, and give its share of the result."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from evenpipe.megatron.trainer import data
from evenpipe.megatron.trainer.engines import engine_for
from evenpipe.megatron.trainer.gather import Coordinates, Share, combine, digest, gather
from evenpipe.megatron.trainer.loop import Tell, Watched, iterate
from evenpipe.megatron.trainer.options import TrainOptions
from evenpipe.megatron.trainer.recorder import Recorder
from evenpipe.megatron.trainer.result import RunResult
from evenpipe.megatron.trainer.step import make_learner
from evenpipe.megatron.trainer.whereabouts import Whereabouts

__all__ = ["run_case"]


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
        recorder = Recorder(whereabouts)
        with engine_for(learner, whereabouts.stage, recorder) as engine:
            found = iterate(Watched(learner, engine, recorder, whereabouts), 0, lambda done: False, tell)
        whereabouts.enter("gathering results")
        share = Share(_coordinates(), found, digest(learner.replica.chunks), recorder.unit_bytes, recorder.spans)
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
