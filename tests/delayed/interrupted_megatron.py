"""Two stages that train in fp16, once as they are, and once with evaluations, saves and resumes in between.

Argument: a folder (rank-<rank>.json out).
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state, pipeline_parallel

from evenpipe.megatron.cpu_mode import cpu_mode
from evenpipe.megatron.train_engine.engines import engine_for
from evenpipe.megatron.train_engine.state import capture, restore
from evenpipe.megatron.train_engine.step import forward_step, make_learner, micro_batches, train_step
from evenpipe.train import data
from evenpipe.train.gather import digest
from evenpipe.train.options import TrainOptions
from evenpipe.train.recorder import Recorder
from evenpipe.train.whereabouts import Whereabouts

WORLD, ITERATIONS = 2, 10
SMALL = {"layers": 2, "hidden": 16, "heads": 2, "seq_length": 16, "stages": WORLD, "micro_batches": 3}
# The first losses are scaled by too much.
FP16 = {"precision": "fp16", "initial_loss_scale": 2.0**20, "clip_grad": 0.1}


class Training:
    """A model and what trains it, from an iteration on."""

    def __init__(self, options: TrainOptions, iterations: int = 0, state: dict[str, Any] | None = None) -> None:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=WORLD)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        self.whereabouts = Whereabouts(stage)
        self.learner = make_learner(options, data.load(options), torch.device("cpu"))
        self._entered = ExitStack()
        self.engine = self._entered.enter_context(engine_for(self.learner, stage, Recorder(self.whereabouts)))
        if state is not None:
            restore(self.learner, self.engine, state)
        self._streams = micro_batches(self.learner, iterations)
        self._others = micro_batches(self.learner, 100)

    def step(self) -> list[str]:
        """The losses of an iteration."""
        losses = train_step(self.learner, self._streams, self.whereabouts).reduced
        return [str(loss["lm loss"].tolist()) for loss in losses]

    def evaluate(self) -> None:
        """On other samples."""
        options = self.learner.options
        with torch.no_grad():
            pipeline_parallel.get_forward_backward_func()(
                forward_step_func=partial(forward_step, options, self.whereabouts),
                data_iterator=self._others[0],
                model=self.learner.replica.chunks[0],
                num_microbatches=options.micro_batches,
                seq_length=options.seq_length,
                micro_batch_size=options.micro_batch_size,
                decoder_seq_length=options.seq_length,
                forward_only=True,
            )

    def saved(self, path: Path) -> dict[str, Any]:
        """What a checkpoint has of it."""
        self.engine.extra.drain()
        torch.save(capture(self.learner, self.engine), path)
        return torch.load(path)

    def scale(self) -> float:
        """What losses of the next batch would be multiplied by."""
        self.engine.extra.drain()
        return self.learner.optimizer.get_loss_scale().item()

    def close(self) -> str:
        """The end; the weights."""
        self.engine.extra.drain()
        weights = digest(self.learner.replica.chunks)
        self._entered.close()
        parallel_state.destroy_model_parallel()
        return weights


def train(options: TrainOptions, path: Path | None) -> dict[str, Any]:
    """Losses and weights; with a `path`, after interruptions."""
    training = Training(options)
    losses = []
    for iteration in range(ITERATIONS):
        losses.append(training.step())
        if path is None:
            continue
        training.evaluate()
        state = training.saved(path)
        if iteration in (2, 3, 6):
            training.close()
            training = Training(options, iteration + 1, state)
    scale = training.scale()
    return {"losses": losses, "scale": scale, "weights": training.close()}


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), CUDA_VISIBLE_DEVICES="", CUDA_DEVICE_MAX_CONNECTIONS="1")
    cpu_mode().apply()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", WORLD), rank=rank, world_size=WORLD)
    options = TrainOptions.of(**SMALL, **FP16, schedule="2bw", iterations=ITERATIONS)
    found = [train(options, path) for path in (None, Path(folder, f"rank-{rank}.pt"))]
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(run, (sys.argv[1],), nprocs=WORLD, start_method="fork")
