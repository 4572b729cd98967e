"""Messages between processes that share a GPU, over gloo and the host's memory, with the order and waits of NCCL's.

NCCL refuses two ranks on one device, and gloo cannot send a GPU's memory. Here a thread carries what gloo sends and
receives, and a stream of the group's own stands still until it has: as under NCCL, the host goes on, streams wait for
messages, and a synchronisation of the device waits for every message that has been posted.
"""

from __future__ import annotations

import ctypes
import os
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from evenpipe.runtime import connections

__all__ = ["stage_messages"]


def stage_messages(device: torch.device) -> Callable[[], None]:
    """From here on this process' channels are staged. Returns what waits for all that their streams have been given."""
    opened, groups = connections._open_group, WeakSet[Staged]()

    def open_group(kind: str, source: int, target: int, backend: str, timeout: Any) -> Any:
        group = opened(kind, source, target, "gloo", timeout)
        if kind.endswith(" layout"):  # between hosts
            return group
        staged = Staged(group, CudaStream(device) if device.type == "cuda" else HostStream())
        groups.add(staged)
        return staged

    def synchronise() -> None:
        for group in list(groups):
            group.stream.mark().synchronize()

    open_group.__wrapped__ = opened  # type: ignore[attr-defined]
    connections._open_group = open_group
    dist.ProcessGroup.allreduce_coalesced = _one_by_one  # type: ignore[method-assign, assignment]
    return synchronise


def _one_by_one(group: dist.ProcessGroup, tensors: list[Tensor], options: Any) -> dist.Work:
    """Gloo's `allreduce_coalesced`, by which Megatron reduces gradients, takes tensors of the host only."""
    each = dist.AllreduceOptions()
    each.reduceOp = options.reduceOp
    *first, last = [group.allreduce([tensor], each) for tensor in tensors]
    for work in first:
        work.wait()
    return last


class CudaStream:
    """A stream of the device, which can wait for the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._reached = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._reached_array = self._reached.numpy()
        self._held = 0
        self._driver = ctypes.CDLL("libcuda.so.1")

    def follow_current(self) -> None:
        """What comes next waits for what the current stream has been given."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        """What `synchronize` has the host wait for, and `wait` the current stream."""
        return self._stream.record_event(torch.cuda.Event(blocking=True))

    def hold(self) -> None:
        """What comes next waits until `release` has been called once more than before all earlier ones."""
        self._held += 1
        stream, address = ctypes.c_void_p(self._stream.cuda_stream), ctypes.c_uint64(self._reached.data_ptr())
        at_least = ctypes.c_uint(0)
        status = self._driver.cuStreamWaitValue32_v2(stream, address, ctypes.c_uint32(self._held), at_least)
        if status:
            raise RuntimeError(f"cuStreamWaitValue32: CUDA error {status}: streams cannot wait for the host here")

    def release(self) -> None:
        self._reached_array[0] += 1


class HostStream:
    """The same without a GPU: a thread that does what it is given, in order."""

    def __init__(self) -> None:
        self._thread, self._reached = ThreadPoolExecutor(1), Semaphore(0)

    def follow_current(self) -> None:
        """The host has computed what comes before."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._thread.submit(target.copy_, source)

    def mark(self) -> Any:
        done = self._thread.submit(lambda: None)
        return SimpleNamespace(synchronize=done.result, wait=done.result)

    def hold(self) -> None:
        self._thread.submit(self._reached.acquire)

    def release(self) -> None:
        self._reached.release()


class Staged:
    """A two-rank gloo `group` with a `stream` of its own; what a `Channel` uses of a process group."""

    def __init__(self, group: Any, stream: CudaStream | HostStream) -> None:
        self._group = group
        self.stream = stream
        self._carrier = ThreadPoolExecutor(1)
        self.rank, self.abort = group.rank, group.abort

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        host = _on_host(tensors[0])
        self.stream.follow_current()
        self.stream.copy(host, tensors[0])
        copied = self.stream.mark()
        self._carry(lambda: (copied.synchronize(), self._group.send([host], peer, tag).wait()))
        return self.stream.mark()

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        host = _on_host(tensors[0])
        self.stream.follow_current()
        self._carry(lambda: self._group.recv([host], peer, tag).wait())
        self.stream.copy(tensors[0], host)
        return self.stream.mark()

    def _start_coalescing(self) -> None:
        """The operations that follow are one message."""

    def _end_coalescing(self) -> Any:
        return self.stream.mark()

    def shutdown(self) -> None:
        self._carrier.shutdown()
        self._group.shutdown()

    def _carry(self, message: Callable[[], object]) -> None:
        def carry() -> None:
            try:
                message()
            except BaseException:
                traceback.print_exc()
                os._exit(1)  # the stream would stand still, and nobody know why
            self.stream.release()

        self._carrier.submit(carry)
        self.stream.hold()


def _on_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
