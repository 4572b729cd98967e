"""A GPU with one queue is told by the environment, and all ranks of a pipeline go by it if one of them does."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from evenpipe.runtime import device_queues


def test_a_cpu_has_no_queues(monkeypatch):
    """Nothing is asked of other ranks: there are none here."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert not device_queues.one_queue(None, torch.device("cpu"))


def ask(rank, store_path, results):
    """Of the job, of two pipelines, and of the job again; only the last rank's GPU has one queue, at first."""
    dist.init_process_group("gloo", store=dist.FileStore(store_path, 3), rank=rank, world_size=3)
    pipelines = [dist.new_group([0, 1]), dist.new_group([2])]
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1" if rank == 2 else "8"
    found = [device_queues.one_queue(group, torch.device("cuda")) for group in (None, pipelines[rank == 2])]
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    results.put((rank, [*found, device_queues.one_queue(None, torch.device("cuda"))]))
    dist.barrier()
    dist.destroy_process_group()


def test_all_ranks_get_the_same_answer(tmp_path):
    """Through their store, which needs no GPU."""
    results = mp.get_context("fork").Queue()
    mp.start_processes(ask, (str(tmp_path / "store"), results), nprocs=3, start_method="fork")
    found = dict(results.get() for _ in range(3))
    assert found == {0: [True, False, False], 1: [True, False, False], 2: [True, True, False]}
