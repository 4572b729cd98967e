"""The link between a device and its host's memory: copies out and back, one after the other each way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evenpipe.runtime import streams
from evenpipe.runtime.host_memory import Block, HostMemory

__all__ = ["HostLink", "Passage"]


class Passage:
    """A copy under way; `target` is what it is copied into: of one to the host, what `HostLink.back` takes."""

    __slots__ = ("_wait", "target")

    def __init__(self, target: Any, wait: Callable[[], None]) -> None:
        self.target = target
        self._wait = wait

    def wait(self) -> None:
        """Have what comes next find it complete: the host waits, or on CUDA the current stream."""
        self._wait()


class HostLink:
    """Copies of contiguous uint8 tensors. Each direction is first in, first out, and runs beside compute.

    A stream for each direction, so that they also run beside one another. `memory`: of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._out, self._back = streams.opened(device), streams.opened(device)
        self._device = device
        self.memory = HostMemory(device)

    @property
    def named(self) -> dict[str, streams.Stream]:
        """The streams of copies out and back, by name."""
        return {"swaps to the host": self._out, "swaps from the host": self._back}

    def out(self, memory: Tensor) -> Passage:
        """Start to copy `memory`, as it is when all that has been given to the device so far is done, to the host.

        `memory` has to be kept until the copy has been waited for.
        """
        block = self.memory.lend(memory.numel())
        if block.through is not None:  # a copy back may still read it
            self._out.wait_event(block.through)
        return Passage(block, self._start(self._out, memory, block.memory, block))

    def back(self, host: Block, memory: Tensor) -> Passage:
        """Start to copy what `out` has brought to the `host` into `memory`, which has to be kept as there."""
        self._back.wait_event(host.through)
        return Passage(memory, self._start(self._back, host.memory, memory, host))

    def _start(self, stream: streams.Stream, source: Tensor, target: Tensor, block: Block) -> Callable[[], None]:
        # What is copied has been computed by then; and memory that is copied into may have been used by others before.
        stream.wait_stream(streams.current(self._device))
        with streams.on(stream):
            target.copy_(source, non_blocking=True)
            event = stream.record_event()
        block.through = event
        return lambda: streams.current(self._device).wait_event(event)
