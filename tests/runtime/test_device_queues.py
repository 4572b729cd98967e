"""What holds up a GPU is told by its environment, and all ranks of a pipeline go by it if one of them does."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from evenpipe.runtime.device_queues import queues_of
from evenpipe.runtime.pulse import Pulse

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def ask(rank, store_path, results):
    """Of the job, of two pipelines, and of the job again; only the last rank's GPU has one queue, at first."""
    dist.init_process_group("gloo", store=dist.FileStore(store_path, 3), rank=rank, world_size=3)
    job, pipeline = range(3), [[0, 1], [2]][rank == 2]
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1" if rank == 2 else "8"
    pulse = Pulse(job, timedelta(minutes=1))
    found = [queues_of(ranks, GPU, "many", pulse) for ranks in (job, pipeline)]
    found.append(queues_of(job, CPU, "many", pulse))  # which has none
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1" if rank == 1 else "0"
    found.append(queues_of(job, GPU, "many", pulse))
    os.environ["CUDA_LAUNCH_BLOCKING"] = "0"
    found.append(queues_of(job, CPU, "synchronised" if rank == 0 else "many", pulse))
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    results.put((rank, [*found, queues_of(job, GPU, "many", pulse)]))
    dist.barrier()
    dist.destroy_process_group()


def test_all_ranks_get_the_same_answer(tmp_path):
    """Through their store, which needs no GPU."""
    results = mp.get_context("fork").Queue()
    mp.start_processes(ask, (str(tmp_path / "store"), results), nprocs=3, start_method="fork")
    found = dict(results.get() for _ in range(3))
    then = ["many", "synchronised", "synchronised", "many"]
    assert found == {0: ["one", "many", *then], 1: ["one", "many", *then], 2: ["one", "one", *then]}
