"""A GPU with one queue is told by the environment, and all ranks of a pipeline go by it if one of them does."""

import pytest
import torch

from evenpipe.runtime import device_queues


def test_a_cpu_has_no_queues(monkeypatch):
    """Nothing is asked of other ranks: there are none here."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert not device_queues.one_queue(None, torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("connections", "one"), [("1", True), ("8", False)])
def test_a_gpu_has_as_many_as_the_environment_says(connections, one, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    assert device_queues.one_queue(None, torch.device("cuda")) is one
    torch.distributed.destroy_process_group()
