"""A link to host memory whose copies sleep, beside the compute of an emulated accelerator."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from emulation import Accelerator, sleep_until
from torch import Tensor

from evenpipe.runtime.host_memory import Block, HostLink, Passage

__all__ = ["EmulatedHostLink"]


class EmulatedHostLink(HostLink):
    """A `HostLink` without streams: each direction copies one after the other, in its own thread.

    A copy starts when the accelerator has done what it was given before and the direction is free, takes `ms_a_byte`,
    and is made when that time is over, so that memory that is given up too soon is noticed by whoever checks it.
    """

    def __init__(self, accelerator: Accelerator, ms_a_byte: float) -> None:
        super().__init__(torch.device("cpu"))
        self._accelerator = accelerator
        self._ms_a_byte = ms_a_byte
        self._to_host, self._to_device = (_Direction(accelerator, ms_a_byte) for _ in range(2))

    def ms_a_byte(self) -> float:
        """Return what was given."""
        return self._ms_a_byte

    def out(self, memory: Tensor) -> Passage:
        """Copies when the link would have."""
        block = self.memory.lend(memory.numel())
        return self._passage(block, block, *self._to_host.copy(memory, block.memory[: memory.numel()]))

    def back(self, host: Block, memory: Tensor) -> Passage:
        """Copies when the link would have; the block is not lent again before that."""
        return self._passage(memory, host, *self._to_device.copy(host.memory[: memory.numel()], memory))

    def close(self) -> None:
        """End both threads."""
        self._to_host.close()
        self._to_device.close()

    def _passage(self, target: Tensor | Block, lent: Block, until_ms: float, copied: Future[None]) -> Passage:
        def wait(kept: Block = lent) -> None:
            copied.result()
            self._accelerator.not_before(until_ms)

        return Passage(target, wait)


class _Direction:
    def __init__(self, accelerator: Accelerator, ms_a_byte: float) -> None:
        self._accelerator = accelerator
        self._ms_a_byte = ms_a_byte
        self._free_ms = 0.0
        self._thread = ThreadPoolExecutor(1)

    def copy(self, source: Tensor, target: Tensor) -> tuple[float, Future[None]]:
        """When it is there, and what waits for that."""
        self._free_ms = until_ms = max(self._accelerator.free_ms, self._free_ms) + source.numel() * self._ms_a_byte
        return until_ms, self._thread.submit(_copy, source, target, until_ms)

    def close(self) -> None:
        self._thread.shutdown()


def _copy(source: Tensor, target: Tensor, until_ms: float) -> None:
    sleep_until(until_ms)
    target.copy_(source)
