"""Four processes that train case after case and write down what each saved at most and what it still holds.

Arguments: a folder (rank-<rank>.json out), and the names of the cases as a JSON list.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from evenpipe.megatron.train_engine.engine import opened
from evenpipe.train.options import TrainOptions
from evenpipe.train.run import iterate

sys.path.insert(0, str(Path(__file__).parents[1]))
from live_memory import case_of, join, live_bytes, nobody

WORLD = 4
FOUR: dict[str, Any] = {"layers": 4, "hidden": 64, "seq_length": 32, "stages": 4, "micro_batches": 7, "iterations": 2}
TWO: dict[str, Any] = {**FOUR, "stages": 2, "micro_batches": 4}
K2 = {"schedule": "kfkb", "group_size": 2}
CASES: dict[str, dict[str, Any]] = {
    "fp32, momentum": {**FOUR, "optimizer": "sgd", "momentum": 0.9},
    "fp32, SGD, untied, micro-batches of 4": {**FOUR, "optimizer": "sgd", "untie_embeddings": True}
    | {"micro_batch_size": 4},
    "2F2B, dropout, selective recompute": {**FOUR, **K2, "dropout": 0.1, "recompute": "selective"},
    "2F2B, BPipe, dropout": {**FOUR, **K2, "bpipe": True, "dropout": 0.1, "micro_batches": 9},
    "BERT, bf16, full recompute": {**FOUR, "model": "bert", "precision": "bf16", "recompute": "full"},
    "BERT, fp16, 2F2B, BPipe": {**FOUR, **K2, "model": "bert", "precision": "fp16", "bpipe": True},
    "bf16, distributed optimizer": {
        **TWO,
        **K2,
        "data_parallel": 2,
        "precision": "bf16",
        "distributed_optimizer": True,
    },
    "fp32, distributed optimizer": {**TWO, "data_parallel": 2, "distributed_optimizer": True},
    "tensor-parallel, fp16": {**TWO, **K2, "tensor_parallel": 2, "precision": "fp16", "micro_batch_size": 2},
}
# What differs little from a case that is not among these.
LONG = {"fp32, SGD, untied, micro-batches of 4", "BERT, bf16, full recompute", "fp32, distributed optimizer"}


def train(options: TrainOptions) -> dict[str, int]:
    """What this process held."""
    before = live_bytes()  # Megatron's distributed optimizer does not let go of all of an earlier model
    case = case_of(options)
    with opened(case) as engine:
        engine.begin(0)
        found = iterate(case, engine, 0, lambda done: done == options.iterations, nobody)
        stage = engine.coordinates.stage
        return {"stage": stage, "live": live_bytes() - before, "saved": found.measured.peak_saved_bytes}


def run(rank: int, folder: str, names: list[str]) -> None:
    join(rank, folder, WORLD)
    train(TrainOptions.of(**FOUR))  # masks and the like are made once for all
    found = {name: train(TrainOptions.of(**case)) for name, case in CASES.items() if name in names}
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    gc.freeze()  # what is imported holds no tensors to be counted
    mp.start_processes(run, (sys.argv[1], json.loads(sys.argv[2])), nprocs=WORLD, start_method="fork")
