"""Groups with NCCL's contract, whose bytes gloo carries.

A communicator has a stream of its own. An operation reads and writes there, after what the current stream had been
given when it was enqueued; `wait` has the current stream wait, and the host goes on. Nothing keeps the tensors but the
caller: torch's releases record streams on them, which passes by DLPack's memory, or stash them until the first `wait`.
Received bytes are in memory from the first `wait` on, and NaNs before.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.rig.clocks import Event
from tests.rig.races import Memory, place, unseen

__all__ = ["CheckedGathers", "CheckedGroup", "HostGroup"]


class _Moving:
    """An operation of gloo's on memory that it keeps. Waiting for one twice never ends, so it is waited for once."""

    def __init__(self, work: Any, staged: Tensor) -> None:
        self._work, self.staged = work, staged

    def finish(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class _Arrival:
    """Bytes for a block, wherever that is by then."""

    def __init__(self, memory: Memory, target: Tensor, moving: _Moving) -> None:
        self._block, self._address = memory.block_of(target), target.data_ptr()
        self._moving = moving

    def land(self) -> None:
        self._moving.finish()
        if self._block is not None and not self._block.is_free:  # else it would be somebody else's memory
            staged = self._moving.staged
            ctypes.memmove(self._address, staged.data_ptr(), staged.nbytes)


class _Work:
    def __init__(self, memory: Memory, event: Event, arriving: list[_Arrival]) -> None:
        self._memory, self._event, self._arriving = memory, event, arriving

    def wait(self) -> None:
        for arrival in self._arriving:
            arrival.land()
        self._arriving = []
        self._memory.device.current.wait_event(self._event)


class CheckedGroup:
    """A two-rank group as `Channel` uses `ProcessGroupNCCL`."""

    def __init__(self, memory: Memory, group: Any) -> None:
        self.stream = memory.device.deal("high")
        self._memory, self._group = memory, group
        self._moving: list[_Moving] = []
        self._arriving: list[_Arrival] = []

    def rank(self) -> int:
        return int(self._group.rank())

    def _start_coalescing(self) -> None:
        self._arriving = []

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._enqueue()
        for tensor in tensors:
            self._memory.read(tensor, self.stream, place("nccl send"))
            with unseen():
                sent = tensor.clone()
                self._moving.append(_Moving(self._group.send([sent], peer, tag), sent))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._enqueue()
        for tensor in tensors:
            self._memory.write(tensor, self.stream, place("nccl recv"))
            with unseen():
                staged = torch.empty_like(tensor)
                self._moving.append(_Moving(self._group.recv([staged], peer, tag), staged))
            self._arriving.append(_Arrival(self._memory, tensor, self._moving[-1]))

    def _enqueue(self) -> None:
        self.stream.wait_stream(self._memory.device.current)
        self.stream.give()

    def _end_coalescing(self) -> _Work:
        return _Work(self._memory, self.stream.record_event(), self._arriving)

    def shutdown(self) -> None:
        for moving in self._moving:
            moving.finish()
        self._group.shutdown()

    def abort(self) -> None:
        self._group.abort()


class HostGroup:
    """A group between hosts, as `Channel` uses one of a device. It blocks the host, whoever forgets to wait."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._moving: list[_Moving] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def _start_coalescing(self) -> None:
        pass

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._moving += [_Moving(self._group.send([sent], peer, tag), sent) for sent in tensors]

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        for tensor in tensors:
            self._group.recv([tensor], peer, tag).wait()

    def _end_coalescing(self) -> HostGroup:
        return self

    def wait(self) -> None:
        pass


class CheckedGathers:
    """`dist.all_gather_into_tensor`, asynchronous, on a stream of its own for each group."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._streams: dict[Any, Any] = {}

    def __call__(self, gathered: Tensor, mine: Tensor, group: Any, async_op: bool) -> _Work:
        assert async_op
        if group not in self._streams:
            self._streams[group] = self._memory.device.deal("plain")
        stream = self._streams[group]
        stream.wait_stream(self._memory.device.current)
        stream.give()
        self._memory.read(mine, stream, place("nccl all-gather"))
        self._memory.write(gathered, stream, place("nccl all-gather"))
        with unseen():
            staged = torch.empty_like(gathered)
            work = dist.distributed_c10d.all_gather_into_tensor(staged, mine.clone(), group=group, async_op=True)
        return _Work(self._memory, stream.record_event(), [_Arrival(self._memory, gathered, _Moving(work, staged))])
