"""A job of one process."""

import pytest
import torch.distributed as dist


@pytest.fixture
def alone():
    """No other rank lacks anything."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
