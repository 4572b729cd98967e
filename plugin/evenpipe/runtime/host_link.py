"""The link between a device and its host's memory: copies out and back, one after the other each way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["CudaHostLink", "HostLink", "Passage", "host_link_for"]


class Passage:
    """A copy under way; `target` is what it is copied into."""

    __slots__ = ("_wait", "target")

    def __init__(self, target: Tensor, wait: Callable[[], None]) -> None:
        self.target = target
        self._wait = wait

    def wait(self) -> None:
        """Have what comes next find it complete: the host waits, or on CUDA the current stream."""
        self._wait()


class HostLink(Protocol):
    """Copies of contiguous uint8 tensors. Each direction is first in, first out, and runs beside compute."""

    def out(self, memory: Tensor) -> Passage:
        """Start to copy `memory`, as it is when all that has been given to the device so far is done, to the host."""

    def back(self, host: Tensor, memory: Tensor) -> Passage:
        """Start to copy what `out` has brought to the `host` into `memory`."""


class _HostMemory:
    """On a CPU, device and host are one: copies are made at once."""

    def out(self, memory: Tensor) -> Passage:
        return Passage(memory.clone(), _at_once)

    def back(self, host: Tensor, memory: Tensor) -> Passage:
        memory.copy_(host)
        return Passage(memory, _at_once)


class CudaHostLink:
    """Pinned host memory, and a stream for each direction, so that both go beside compute and beside one another."""

    def __init__(self, device: torch.device) -> None:
        self._out, self._back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._device = device

    def out(self, memory: Tensor) -> Passage:
        """Into pinned memory; `memory` has to be kept until it has been waited for."""
        host = torch.empty(memory.numel(), dtype=torch.uint8, pin_memory=True)
        return self._start(self._out, memory, host)

    def back(self, host: Tensor, memory: Tensor) -> Passage:
        """From pinned memory; `host` has to be kept until it has been waited for."""
        return self._start(self._back, host, memory)

    def _start(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> Passage:
        # What is copied has been computed by then; and memory that is copied into may have been used by others before.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = stream.record_event()
        return Passage(target, lambda: torch.cuda.current_stream(self._device).wait_event(event))


def host_link_for(device: torch.device) -> HostLink:
    """The link that a device really has."""
    return CudaHostLink(device) if device.type == "cuda" else _HostMemory()


def _at_once() -> None:
    pass
