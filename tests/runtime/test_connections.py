"""Whom a host's heartbeat watches, and which streams links have: of NCCL's a stand-in, as torch for CPUs has none."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evenpipe.runtime.channel import _open_group
from evenpipe.runtime.connections import streams_of, watched
from evenpipe.schedule import Link

CHANNELS = [SimpleNamespace(source=source, target=target) for source, target in ((4, 6), (6, 4), (6, 8), (6, 5))]


@pytest.mark.parametrize(("device", "ranks"), [("cuda", {4, 5, 6, 8}), ("cpu", set())])
def test_who_is_watched(device: str, ranks: set[int]) -> None:
    """NCCL's watchdog ends a process and names a link; gloo's waits time out on the host, which names a rank."""
    assert watched(device, CHANNELS) == ranks
    assert watched(device, []) == set()


class NCCL:
    """ProcessGroupNCCL's interface, as far as making one goes."""

    class Options(SimpleNamespace):
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace())

    def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
        self.options = options


def test_a_link_s_stream_is_of_high_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pool that layers' streams are not dealt from."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "ProcessGroupNCCL", NCCL, raising=False)
        group: Any = _open_group("load", 0, 1, "nccl", timedelta(minutes=1))
        assert group.options.is_high_priority_stream
    finally:
        dist.destroy_process_group()


def test_the_streams_that_are_compared_as_links_open() -> None:
    """That of compute, and those of what a partner sends, which waits for what has to leave first."""
    link, evict, load = Link("forward", 0, 1), Link("evict", 0, 3), Link("load", 3, 0)
    channels: Any = {
        one: SimpleNamespace(target=10 + one.target, side=SimpleNamespace(cuda_stream=5)) for one in (link, evict, load)
    }
    assert [*streams_of(channels, 10, torch.device("cpu"))] == ["compute", "what waits before load 3→0"]
    assert [*streams_of(channels, 13, torch.device("cpu"))] == ["compute", "what waits before evict 0→3"]
