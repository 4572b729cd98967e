"""Groups of micro-batches need several queues, which only GPUs may lack."""

import pytest

from evenpipe.runtime.device_queues import ONE_QUEUE, one_queue


@pytest.mark.parametrize(
    ("device", "environment", "one"),
    [
        ("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, True),
        ("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, False),
        ("cuda", {}, False),
        ("cpu", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, False),
    ],
)
def test_one_queue(device, environment, one):
    assert one_queue(device, environment) is one
    assert ONE_QUEUE.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 ")
