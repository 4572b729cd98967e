"""What holds up a GPU is told by its environment, and all ranks of a pipeline go by it if one of them does.

How many hardware queues a rank's streams need is counted, and told where CUDA has fewer for them.
"""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from evenpipe.runtime.connections import groups_over, queues_line, queues_of
from evenpipe.runtime.heartbeat import Heartbeat

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def ask(rank, store_path, results):
    """Of the job, of two pipelines, and of the job again; only the last rank's GPU has one queue, at first."""
    dist.init_process_group("gloo", store=dist.FileStore(store_path, 3), rank=rank, world_size=3)
    job, pipeline = range(3), [[0, 1], [2]][rank == 2]
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1" if rank == 2 else "8"
    heartbeat = Heartbeat(job, timedelta(minutes=1))
    found = [queues_of(ranks, GPU, "many", heartbeat) for ranks in (job, pipeline)]
    found.append(queues_of(job, CPU, "many", heartbeat))  # which has none
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1" if rank == 1 else "0"
    found.append(queues_of(job, GPU, "many", heartbeat))
    os.environ["CUDA_LAUNCH_BLOCKING"] = "0"
    found.append(queues_of(job, CPU, "synchronised" if rank == 0 else "many", heartbeat))
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    assert (groups_over("gloo"), groups_over("nccl")) == (1, 0)  # the job's
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2], [0, 1, 2])]
    assert len(groups) == 3
    assert groups_over("gloo") == (2 if rank == 2 else 3), "a group of one rank has no communicator"
    results.put((rank, [*found, queues_of(job, GPU, "many", heartbeat)]))
    dist.barrier()
    dist.destroy_process_group()


def test_all_ranks_get_the_same_answer(tmp_path):
    """Through their store, which needs no GPU."""
    results = mp.get_context("fork").Queue()
    mp.start_processes(ask, (str(tmp_path / "store"), results), nprocs=3, start_method="fork")
    found = dict(results.get() for _ in range(3))
    then = ["many", "synchronised", "synchronised", "many"]
    assert found == {0: ["one", "many", *then], 1: ["one", "many", *then], 2: ["one", "one", *then]}


#: Of a Megatron rank in the middle of a pipeline under BPipe.
STREAMS = {"compute": 1, "links": 6, "loads that wait": 1, "groups": 7}


@pytest.mark.parametrize("given", ["1", "15", "32"])
def test_one_queue_or_enough_are_nothing_to_speak_of(given):
    assert queues_line(STREAMS, {"CUDA_DEVICE_MAX_CONNECTIONS": given}) == ""
    assert queues_line({"compute": 1, "links": 2, "loads that wait": 0, "groups": 1}, {}) == ""


@pytest.mark.parametrize(
    ("environ", "have"),
    [
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "2"}, "2 hardware queues of each GPU (CUDA_DEVICE_MAX_CONNECTIONS=2)"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "8 hardware queues of each GPU (CUDA_DEVICE_MAX_CONNECTIONS=8)"),
        ({}, "8 hardware queues of each GPU (CUDA's default without CUDA_DEVICE_MAX_CONNECTIONS)"),
    ],
)
def test_fewer_than_there_are_streams_are_told_with_the_number_to_set(environ, have):
    assert queues_line(STREAMS, environ) == (
        f"queues: {have} for 15 streams (1 of compute, 6 of links, 1 of loads that wait, 7 of groups), and streams "
        "that share a queue hold each other up: start with CUDA_DEVICE_MAX_CONNECTIONS=15 or more, up to 32"
    )


def test_cuda_has_32_queues_at_most():
    many = {**STREAMS, "groups": 40}
    assert queues_line(many, {}).endswith(": start with CUDA_DEVICE_MAX_CONNECTIONS=32, the most there are")
    assert queues_line(many, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}) == ""
