"""Runs EvenPipe's runtime on CPU tensors as on a device with streams, and looks for races."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from evenpipe.runtime import channel, connections, exchange, streams
from tests.rig.backward import BackwardStreams
from tests.rig.clocks import Event, Stream
from tests.rig.nccl import CheckedGathers, CheckedGroup, HostGroup
from tests.rig.races import Crossings, Memory, Operations, place, poison, unseen

__all__ = ["CheckedStreams", "checking"]


class CheckedStreams:
    """What `streams` knows of a kind of device."""

    is_asynchronous = True

    def __init__(self, memory: Memory) -> None:
        self._memory, self._device = memory, memory.device

    def opened(self, device: torch.device) -> Stream:
        return self._device.deal("high")

    def current(self, device: torch.device) -> Stream:
        return self._device.current

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        return self._device.on(stream)

    def timed_event(self, device: torch.device) -> Event:
        return self._device.current.record_event()

    def pinned(self, device: torch.device, nbytes: int) -> Tensor:
        self._memory.sweep()
        with unseen():
            memory = torch.empty(nbytes, dtype=torch.uint8)
        self._memory.allocated(memory, self._device.host, place("pinned"))
        poison(memory)
        return memory

    def synchronize(self, device: torch.device) -> None:
        for stream in self._device.streams:
            stream.synchronize()

    def records_any_address(self) -> bool:
        return True


@contextmanager
def checking(memory: Memory) -> Iterator[Memory]:
    """Inside, CPU tensors are a device's, links are NCCL's, and `memory` notes races of this thread's work.

    What hosts tell each other of layouts stays between hosts.
    """
    open_group: Any = connections._open_group

    def opened(kind: str, source: int, target: int, backend: str, timeout: Any) -> CheckedGroup | HostGroup:
        group = open_group(kind, source, target, backend, timeout)
        return HostGroup(group) if kind.endswith(" layout") else CheckedGroup(memory, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(streams.KINDS, "cpu", CheckedStreams(memory))
        patch.setattr(connections, "_open_group", opened)
        patch.setattr(exchange.dist, "all_gather_into_tensor", CheckedGathers(memory))
        for name in ("send", "receive"):
            patch.setattr(channel.Layouts, name, _on_host(getattr(channel.Layouts, name)))
        with Operations(memory), Crossings(memory), BackwardStreams(memory):
            yield memory


def _on_host(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def carried_out(*args: Any) -> Any:
        with unseen():
            return method(*args)

    return carried_out
