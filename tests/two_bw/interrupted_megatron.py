"""Two stages that train in fp16, once as they are, and once with evaluations, saves and resumes in between.

Argument: a folder (rank-<rank>.json out).
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import pipeline_parallel

from evenpipe.megatron.train_engine.engine import MegatronEngine, opened, prepare
from evenpipe.megatron.train_engine.learner import forward_step, micro_batches
from evenpipe.train import data
from evenpipe.train.engine import Case, FailureContext, Recorder
from evenpipe.train.options import TrainOptions

WORLD, ITERATIONS, RESUMED_AFTER = 2, 10, (2, 3, 6)
SMALL = {"layers": 2, "hidden": 16, "heads": 2, "seq_length": 16, "stages": WORLD, "micro_batches": 3, "experts": 4}
# The first losses are scaled by too much.
FP16 = {"precision": "fp16", "initial_loss_scale": 2.0**20, "clip_grad": 0.1}
CORRECTIONS = ("none", "weight-prediction", "error-feedback")
CPU = torch.device("cpu")


def evaluate(options: TrainOptions, engine: MegatronEngine) -> None:
    """On other samples."""
    with torch.no_grad():
        pipeline_parallel.get_forward_backward_func()(
            forward_step_func=partial(forward_step, options),
            data_iterator=micro_batches(engine.learner, 100)[0],
            model=engine.learner.replica.chunks[0],
            num_microbatches=options.micro_batches,
            seq_length=options.seq_length,
            micro_batch_size=options.micro_batch_size,
            decoder_seq_length=options.seq_length,
            forward_only=True,
        )


def train(options: TrainOptions, path: Path | None) -> dict[str, Any]:
    """Losses and weights; with a `path`, after interruptions."""
    losses: list[list[float]] = []
    state = None
    while len(losses) < ITERATIONS:
        failure = FailureContext(dist.get_rank())
        case = Case(options, data.load(options), CPU, failure, Recorder(failure), lambda text: None)
        with opened(case) as engine:
            if state is not None:
                engine.restore(state)
            engine.begin(len(losses))
            while len(losses) < ITERATIONS:
                losses.append(engine.train(len(losses)))
                if path is not None:
                    evaluate(options, engine)
                    engine.drain()
                    torch.save(engine.state(), path)
                    if len(losses) - 1 in RESUMED_AFTER:
                        state = torch.load(path)
                        break
            engine.drain()
            scale = engine.learner.optimizer.get_loss_scale().item()
            weights = [one.tolist() for one in engine.learner.replica.chunks[0].parameters()]
            found = {"losses": losses, "scale": scale, "weights": weights}
    return found


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), CUDA_VISIBLE_DEVICES="", CUDA_DEVICE_MAX_CONNECTIONS="1")
    prepare(CPU)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", WORLD), rank=rank, world_size=WORLD)
    found = []
    for correction in CORRECTIONS:
        options = TrainOptions.of(**SMALL, **FP16, schedule="2bw", iterations=ITERATIONS, delay_correction=correction)
        found.append([train(options, path) for path in (None, Path(folder, f"rank-{rank}.pt"))])
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(run, (sys.argv[1],), nprocs=WORLD, start_method="fork")
