"""Streams, events, pinned memory and the allocator of a device: all that the runtime uses of `torch.cuda`."""

from __future__ import annotations

import mmap
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor

__all__ = [
    "KINDS",
    "Event",
    "Stream",
    "Streams",
    "current",
    "is_asynchronous",
    "is_capturing",
    "on",
    "opened",
    "pinned",
    "records_any_address",
    "sharing",
    "synchronize",
    "timed_event",
]

#: Lower is sooner. torch deals a device's streams of one priority in turn, 32 of them (c10/cuda/CUDAStream.cpp): those
#: of priority 0 to whoever asks for no other, as frameworks and their layers do. Links ask for high priority as well.
_PRIORITY: Final = -1


class Event(Protocol):
    """A moment in a stream's work, named as `torch.cuda.Event` names things; `elapsed_time` is in milliseconds."""

    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Any, /) -> float: ...


class Stream(Protocol):
    """A queue of work, done in order, beside other streams; named as `torch.cuda.Stream` names things."""

    @property
    def device(self) -> torch.device:
        """Where its work is done."""

    def wait_stream(self, stream: Any, /) -> None:
        """Have later work wait for all that `stream` has been given so far; the host goes on."""

    def wait_event(self, event: Any, /) -> None:
        """Have later work wait for `event`; the host goes on."""

    def record_event(self) -> Any:
        """Return the event of all work so far being done."""


class _HostEvent:
    def __init__(self) -> None:
        self._seconds = time.monotonic()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _HostEvent, /) -> float:
        return (end._seconds - self._seconds) * 1e3


class _HostStream:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, stream: Any, /) -> None:
        pass

    def wait_event(self, event: Any, /) -> None:
        pass

    def record_event(self) -> _HostEvent:
        return _HostEvent()


class Streams:
    """The streams of one kind of device; these are the host's, which does its work at once: nothing waits for it.

    `is_asynchronous`: the host goes on before its device has done its work.
    """

    is_asynchronous = False

    def opened(self, device: torch.device) -> Stream:
        return _HostStream(device)

    def current(self, device: torch.device) -> Stream:
        return _HostStream(device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return nullcontext()

    def timed_event(self, device: torch.device) -> Event:
        return _HostEvent()

    def pinned(self, device: torch.device, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def synchronize(self, device: torch.device) -> None:
        pass

    def records_any_address(self) -> bool:
        return True


class _CudaStreams(Streams):
    is_asynchronous = True

    def opened(self, device: torch.device) -> Stream:
        return cast(Stream, torch.cuda.Stream(device, priority=_PRIORITY))  # type: ignore[no-untyped-call]

    def current(self, device: torch.device) -> Stream:
        return cast(Stream, torch.cuda.current_stream(device))

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def timed_event(self, device: torch.device) -> Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))  # else of whichever device is the current one
        return cast(Event, event)

    def pinned(self, device: torch.device, nbytes: int) -> Tensor:
        # Not by torch's allocator of pinned memory, which rounds up to powers of two.
        pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # No child has them, such as a worker of a DataLoader's: to fork would be to copy all that is pinned, or, before
        # Linux 5.9, to have this process write to a copy, and the device read what was there.
        pages.madvise(mmap.MADV_DONTFORK)
        tensor = torch.frombuffer(pages, dtype=torch.uint8)
        pages.register(device, tensor.data_ptr())
        return tensor

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def records_any_address(self) -> bool:
        return torch.cuda.get_allocator_backend() != "cudaMallocAsync"


class _Pages(mmap.mmap):
    """Pages of the host that CUDA holds in place until they are let go of; unregistered while they are still mapped."""

    _address: int | None = None
    _device: torch.device

    def register(self, device: torch.device, address: int) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))  # type: ignore[no-untyped-call]
        self._device, self._address = device, address

    def __del__(self) -> None:
        if self._address is None or sys.is_finalizing():
            return
        torch.cuda.synchronize(self._device)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._address))  # type: ignore[no-untyped-call]


#: By the type of device; any other is treated as the host.
KINDS: Final[dict[str, Streams]] = {"cuda": _CudaStreams(), "cpu": Streams()}


def _of(device: torch.device) -> Streams:
    return KINDS.get(device.type, KINDS["cpu"])


def is_asynchronous(device: torch.device) -> bool:
    """Return whether the host goes on before `device` has done the work it was given."""
    return _of(device).is_asynchronous


def is_capturing(device: torch.device) -> bool:
    """Return whether this thread's work is recorded for a CUDA graph, whose replays call no Python."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def opened(device: torch.device) -> Stream:
    """Return a stream for the caller's own use, which no layer of a framework that asks for a plain stream shares."""
    return _of(device).opened(device)


def current(device: torch.device) -> Stream:
    """Return the stream that this thread gives work to."""
    return _of(device).current(device)


def on(stream: Stream) -> AbstractContextManager[object]:
    """Give work to `stream`, and take new memory from its pool, inside the block."""
    return _of(stream.device).on(stream)


def timed_event(device: torch.device) -> Event:
    """Return an event of the current stream, recorded now, that `elapsed_time` can be asked of."""
    return _of(device).timed_event(device)


def pinned(device: torch.device, nbytes: int) -> Tensor:
    """Return `nbytes` of host memory that `device` copies to and from beside its work; contents undefined.

    It waits for the device, so that who needs some again and again keeps it.
    """
    return _of(device).pinned(device, nbytes)


def synchronize(device: torch.device) -> None:
    """Have the host wait for all that `device` has been given, on any stream."""
    _of(device).synchronize(device)


def records_any_address(device: torch.device) -> bool:
    """Return whether streams can be recorded on memory that the allocator of `device` has not handed out."""
    return _of(device).records_any_address()


def sharing(named: Mapping[str, Stream]) -> str:
    """Return a line that names the streams which are one and the same to the device; "" if all differ.

    Compares the handles (`cudaStream_t`) that torch shows: of its own streams, not of those that NCCL's groups hold.
    """
    by_handle: defaultdict[object, list[str]] = defaultdict(list)
    for name, stream in named.items():
        by_handle[getattr(stream, "cuda_stream", stream)].append(name)
    shared = [" and ".join(names) for names in by_handle.values() if len(names) > 1]
    if not shared:
        return ""
    return (
        f"streams: {'; '.join(shared)} share one cudaStream, so that each waits for the other: torch deals 32 of a "
        f"priority in turn; have other code open fewer streams of priority {_PRIORITY}"
    )
