"""Whom a host has its pulse watch: those that no wait of its own would name."""

from types import SimpleNamespace

import pytest

from evenpipe.runtime.connections import watched

CHANNELS = [SimpleNamespace(source=source, target=target) for source, target in ((4, 6), (6, 4), (6, 8), (6, 5))]


@pytest.mark.parametrize(("device", "ranks"), [("cuda", {4, 5, 6, 8}), ("cpu", set())])
def test_who_is_watched(device: str, ranks: set[int]) -> None:
    """NCCL's watchdog ends a process and names a link; gloo's waits time out on the host, which names a rank."""
    assert watched(device, CHANNELS) == ranks
    assert watched(device, []) == set()
