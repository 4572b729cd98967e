"""Eight processes that train with 2BW, and write down what waits on each for its step: what it takes, what is said.

Argument: a folder (rank-<rank>.json out).
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

sys.path.insert(0, str(Path(__file__).parent))
from live_memory import case_of, join, nobody

WORLD = 8
_SMALL = {"layers": 8, "hidden": 32, "seq_length": 16, "micro_batches": 8, "iterations": 2, "schedule": "2bw"}
OPTIMIZERS = {
    "Adam": {},
    "the distributed optimizer": {"distributed_optimizer": True, "precision": "bf16"},
    "the distributed optimizer, experts": {"distributed_optimizer": True, "experts": 4},
}
REPLICAS = (1, 2, 4)
SHARES = 2
"""Among how many replicas experts are shared out, where there are so many."""


def train(options: TrainOptions) -> dict[str, Any]:
    """What waits here when all is trained, and what it is made of."""
    case = case_of(options)
    with opened(case) as engine:
        engine.begin(0)
        found = iterate(case, engine, 0, lambda done: False, nobody)
        (chunk,) = engine.learner.replica.chunks
        kinds = {"dense": chunk.buffers, "experts": chunk.expert_parallel_buffers}
        buffers = [buffer for some in kinds.values() for buffer in some]
        theirs = {buffer.grad_data.untyped_storage().data_ptr() for buffer in buffers}
        own = engine.schedule.extra.gradients._own
        storages = {view.untyped_storage() for _, _, view in own._parameters}
        return {
            "stage": engine.coordinates.stage,
            "parameters": [parameter.numel() for buffer in buffers for parameter in buffer.params],
            "buckets": sum(len(buffer.buckets) for buffer in buffers),
            "numbers": {kind: sum(buffer.grad_data.numel() for buffer in some) for kind, some in kinds.items()},
            "held": sum({one.data_ptr(): one.nbytes() for one in storages if one.data_ptr() not in theirs}.values()),
            "said": found.measured.held_gradient_bytes,
        }


def run(rank: int, folder: str) -> None:
    join(rank, folder, WORLD)
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        for replicas in REPLICAS:
            sizes = {"stages": WORLD // replicas, "data_parallel": replicas}
            if "experts" in optimizer:
                sizes["expert_parallel"] = min(replicas, SHARES)
            found[f"{name}, {replicas}"] = train(TrainOptions.of(**{**_SMALL, **optimizer, **sizes}))
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    gc.freeze()
    mp.start_processes(run, (sys.argv[1],), nprocs=WORLD, start_method="fork")
