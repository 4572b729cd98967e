"""Four processes that train with flushes and with 2BW, and write down what each keeps and when it reduces.

Argument: a folder (rank-<rank>.json out).
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from evenpipe.megatron.cpu_mode import cpu_mode
from evenpipe.megatron.train_engine.engine import opened
from evenpipe.schedule import Action
from evenpipe.train import data
from evenpipe.train.engine import Case, FailureContext, Recorder
from evenpipe.train.options import TrainOptions
from evenpipe.train.run import iterate

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.gloo import share_device

WORLD = 4
SMALL = {"layers": 2, "hidden": 32, "seq_length": 16, "stages": 2, "data_parallel": 2, "micro_batches": 3}
CASES = {
    "fp32": {},
    "fp32 without clipping": {"clip_grad": 0.0, "untie_embeddings": True},
    "fp16": {"precision": "fp16", "initial_loss_scale": 1024.0},
    "bf16, distributed optimizer": {"precision": "bf16", "distributed_optimizer": True},
    "fp32, distributed optimizer": {"distributed_optimizer": True},
}


def nobody(report: object) -> None:
    """Is told what a run reports."""


def case_of(options: TrainOptions) -> Case:
    """The run of this process, on CPU."""
    failure = FailureContext(dist.get_rank() // (options.data_parallel * options.tensor_parallel))
    recorder = Recorder(failure)
    return Case(options, data.load(options), torch.device("cpu"), failure, recorder, lambda text: None)


def live_bytes() -> int:
    """Of all storages that Python can reach, each once; inputs are left out, since 2BW has read ahead."""
    for _ in range(2):  # what finalisers let go of is there to be collected after them
        gc.collect()
    storages = {}
    for tensor in gc.get_objects():
        if isinstance(tensor, torch.Tensor) and tensor.dtype not in (torch.int64, torch.int32):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _watch(engine: Any, chunk: Any, reducing: list[tuple[str, bool]]) -> None:
    """Note for each action whether gradients are being reduced between replicas when it ends."""
    ended = engine.ended

    def noting(action: Action) -> None:
        ended(action)
        reducing.append((str(action), any(bucket.grad_reduce_handle is not None for bucket in chunk.bucket_groups)))

    engine.ended = noting


def train(options: TrainOptions) -> dict[str, Any]:
    """What this process keeps when nothing is under way."""
    before = live_bytes()  # Megatron's distributed optimizer does not let go of all of an earlier model
    case = case_of(options)
    reducing: list[tuple[str, bool]] = []
    with opened(case) as engine:
        _watch(engine.schedule, engine.learner.replica.chunks[0], reducing)
        engine.begin(0)
        found = iterate(case, engine, 0, lambda done: False, nobody)
        return {"live": live_bytes() - before, **found.measured._asdict(), "reducing": reducing}


def join(rank: int, folder: str, world: int) -> None:
    """Become one of `world` processes in CPU mode."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), CUDA_VISIBLE_DEVICES="", CUDA_DEVICE_MAX_CONNECTIONS="1")
    cpu_mode().apply()
    share_device()
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def run(rank: int, folder: str) -> None:
    join(rank, folder, WORLD)
    train(TrainOptions.of(**{**SMALL, "iterations": 1}))  # masks and the like are made once for all
    found = {
        name: {
            schedule: train(TrainOptions.of(**{**SMALL, **case, "schedule": schedule, "iterations": 4}))
            for schedule in ("1f1b", "2bw")
        }
        for name, case in CASES.items()
    }
    Path(folder, f"rank-{rank}.json").write_text(json.dumps({"stage": rank // 2, "cases": found}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    gc.freeze()  # what is imported holds no tensors to be counted
    mp.start_processes(run, (sys.argv[1],), nprocs=WORLD, start_method="fork")
