"""How long compute and transfers take: clocks, the spans of a batch, and the speed of a device and of its links."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from evenpipe.runtime import streams
from evenpipe.runtime.channel import Channel, Transfer
from evenpipe.runtime.connections import Connections
from evenpipe.runtime.host_memory import HostLink, Passage
from evenpipe.schedule import Action

__all__ = [
    "Clock",
    "HostClock",
    "SpanRecorder",
    "Stopwatch",
    "StreamClock",
    "clock_for",
    "copying_gbps",
    "matrix_flops",
    "sending_gbps",
]


class Clock(Protocol):
    """Marks moments in a stage's compute. What a mark is, only its clock knows."""

    def mark(self) -> Any:
        """Return the moment at which compute has got this far."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds from one mark to a later one."""


class HostClock:
    """Marks are seconds of the monotonic clock, which the processes of a machine share."""

    def mark(self) -> float:
        return time.monotonic()

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3


class StreamClock:
    """Marks are events on the current CUDA stream: of the time at which the device gets there, not the host.

    Reading waits for the device to get to the later mark; the resolution is about 0.5 µs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> streams.Event:
        return streams.timed_event(self._device)

    def elapsed_ms(self, start: streams.Event, end: streams.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end)


def clock_for(device: torch.device) -> Clock:
    """Return the clock of what is computed on `device`."""
    return StreamClock(device) if streams.is_asynchronous(device) else HostClock()


class Stopwatch:
    """Adds up stretches of one batch.

    On CPU a wait is the time the host is blocked. On CUDA it is the time the current stream stands still; the host goes
    on, and only reading waits for the device. A wait for what is long there takes some microseconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stretches: list[tuple[Any, Any]] = []

    def restart(self) -> None:
        """Forget the stretches so far."""
        self._stretches.clear()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what is done within."""
        start = self._clock.mark()
        yield
        self._stretches.append((start, self._clock.mark()))

    def wait(self, transfer: Transfer | Passage) -> None:
        """Wait for `transfer`, and count the time."""
        with self.running():
            transfer.wait()

    def total_ms(self) -> float:
        """Return the sum since the last `restart`, in milliseconds."""
        return sum(self._clock.elapsed_ms(start, end) for start, end in self._stretches)


class SpanRecorder:
    """Told when actions start and end; keeps their spans. A mark is one of `clock`'s.

    A compute action lasts as long as it takes on the clock's side: on the device under a `StreamClock`. A transfer
    lasts from where compute was when it was started to where compute was when it had been waited for; it may have
    arrived long before that.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started: dict[Action, Any] = {}
        self._ended: list[tuple[Action, Any, Any]] = []

    def clear(self) -> None:
        """Forget what has ended."""
        self._ended.clear()

    def started(self, action: Action) -> None:
        self._started[action] = self._clock.mark()

    def ended(self, action: Action) -> None:
        self._ended.append((action, self._started.pop(action), self._clock.mark()))

    def since(self, origin: Any) -> tuple[tuple[Action, float, float], ...]:
        """(action, start, end) of what has ended, in the order of the ends; milliseconds after the mark `origin`."""
        elapsed_ms = self._clock.elapsed_ms
        return tuple((action, elapsed_ms(origin, start), elapsed_ms(origin, end)) for action, start, end in self._ended)


_LONG_PRODUCT_SECONDS: Final = 0.005
# A GPU is busy with fewer; a CPU takes seconds for more.
_FIRST_ROWS_ON_CPU: Final = 16
#: A row that takes as long is measured alone: processors without instructions for a dtype take seconds for 16 rows.
_SLOW_SECONDS: Final = 0.1
# A host may be busy with something else during one of them: the fastest counts.
_ROUNDS: Final = 5


def matrix_flops(device: torch.device, dtype: torch.dtype, rows: int, inner: int, columns: int) -> float:
    """Return floating-point operations per second in products of (rows, inner) and (inner, columns).

    Takes some 50 ms, with fewer rows on slow devices; more where one row takes 100 ms. Draws no random numbers.
    """
    left = torch.ones(rows, inner, dtype=dtype, device=device)
    right = torch.ones(inner, columns, dtype=dtype, device=device)
    product = torch.empty(rows, columns, dtype=dtype, device=device)

    def seconds(rows: int, times: int) -> float:
        torch.matmul(left[:rows], right, out=product[:rows])  # the first product of a shape also loads its kernel
        streams.synchronize(device)
        start = time.perf_counter()
        for _ in range(times):
            torch.matmul(left[:rows], right, out=product[:rows])
        streams.synchronize(device)
        return time.perf_counter() - start

    if device.type != "cuda" and (elapsed := seconds(1, 1)) > _SLOW_SECONDS:
        return 2 * inner * columns / elapsed
    part, times = rows if device.type == "cuda" else min(rows, _FIRST_ROWS_ON_CPU), 1
    while (elapsed := seconds(part, times)) < _LONG_PRODUCT_SECONDS:
        part, times = (min(rows, 4 * part), times) if part < rows else (part, 4 * times)
    elapsed = min(elapsed, *(seconds(part, times) for _ in range(_ROUNDS - 1)))
    return 2 * part * inner * columns * times / elapsed


_FIRST_BYTES: Final = 1 << 18
_MOST_BYTES: Final = 1 << 30
_MOST_COPIED_BYTES: Final = 1 << 26
_LONG_MESSAGE_SECONDS: Final = 0.01
_BUFFER_BYTES: Final = 1 << 24


def copying_gbps(device: torch.device) -> float:
    """Return the GB/s (10^9 bytes/s) at which `device` copies to its host's pinned memory, and back at the same time.

    Copies grow until they take a while, up to 64 MiB each way: of these there are two on the device and two on the
    host. Nothing else may be under way. Takes some 50 ms.
    """
    nbytes, link = _FIRST_BYTES, HostLink(device)
    while True:
        elapsed = _both_ways_seconds(link, nbytes, device)
        link.memory.give_back()
        if nbytes >= _MOST_COPIED_BYTES or elapsed >= _LONG_MESSAGE_SECONDS:
            return nbytes / elapsed / 1e9
        nbytes *= 4


def _both_ways_seconds(link: HostLink, nbytes: int, device: torch.device) -> float:
    leaving = torch.ones(nbytes, dtype=torch.uint8, device=device)
    coming = torch.empty_like(leaving)
    there, free = link.out(leaving), link.out(leaving)  # pins the memory, which takes time
    for passage in (there, free):
        passage.wait()
    streams.synchronize(device)
    del passage, free  # its block is lent no more
    start = time.perf_counter()
    for passage in (link.out(leaving), link.back(there.target, coming)):
        passage.wait()
    streams.synchronize(device)
    return time.perf_counter() - start


def sending_gbps(connections: Connections, stage: int, device: torch.device) -> float | None:
    """Return the GB/s (10^9 bytes/s) at which `stage` sends activations to its partner; None if it has none.

    Both partners call it, between batches; pairs do not wait for each other. Every message is received, and nothing is
    under way when it returns. Takes some 50 ms on links of 0.1 GB/s and more: messages grow until they take a while.
    """
    ends = {link.source == stage: (link, end) for link, end in connections.channels.items() if _trades(link.kind)}
    if not ends:
        return None
    (link, out), (_, back) = ends[True], ends[False]
    [sizes] = (channel for evict, channel in connections.layouts.items() if _trades(evict.kind))
    pair = _Pair(sizes, out, back, device)
    return pair.lead() if link.kind == "evict" else pair.follow()


def _trades(kind: str) -> bool:
    return kind in ("evict", "load")


class _Pair:
    """One end of the two links; what size comes next is sent on the host's own link, from evictor to acceptor."""

    def __init__(self, sizes: Channel, out: Channel, back: Channel, device: torch.device) -> None:
        self._sizes = sizes
        self._out = out
        self._back = back
        self._device = device
        # Ones: pages of zeros would all be the same one, in the processor's cache.
        self._buffer = torch.ones(_BUFFER_BYTES, dtype=torch.uint8, device=device)
        self._byte = torch.ones(1, dtype=torch.uint8, device=device)

    def lead(self) -> float:
        """Play the evictor's part: a message out, one back, until both have taken long enough."""
        self._there_and_back(_FIRST_BYTES)  # the first message of a link is slow
        nbytes = _FIRST_BYTES
        while True:
            start = time.perf_counter()
            gbps = self._there_and_back(nbytes)
            if nbytes >= _MOST_BYTES or time.perf_counter() - start >= _LONG_MESSAGE_SECONDS:
                self._send_size(0)
                return gbps
            nbytes *= 4

    def _there_and_back(self, nbytes: int) -> float:
        self._send_size(nbytes)
        self._await_confirmation()
        gbps = self._send(nbytes)
        self._receive(nbytes)
        self._finish()
        return gbps

    def follow(self) -> float:
        """Play the acceptor's part, and return its own speed."""
        gbps = 0.0
        while nbytes := self._receive_size():
            self._confirm()
            self._receive(nbytes)
            gbps = self._send(nbytes)
        return gbps

    def _send(self, nbytes: int) -> float:
        """Send `nbytes`, and return how fast they arrived."""
        self._finish()
        start = time.perf_counter()
        transfer = self._out.send(self._message(nbytes))
        self._await_confirmation()
        self._finish()
        elapsed = time.perf_counter() - start
        transfer.wait()
        return nbytes / elapsed / 1e9

    def _receive(self, nbytes: int) -> None:
        self._back.receive(self._message(nbytes)).wait()
        self._confirm()

    def _confirm(self) -> None:
        self._out.send([self._byte]).wait()

    def _await_confirmation(self) -> None:
        self._back.receive([self._byte]).wait()

    def _finish(self) -> None:
        """Have the host come after the device, whose messages it would otherwise only have enqueued."""
        streams.synchronize(self._device)

    def _send_size(self, nbytes: int) -> None:
        self._sizes.send([torch.tensor([nbytes])]).wait()

    def _receive_size(self) -> int:
        nbytes = torch.empty(1, dtype=torch.int64)
        self._sizes.receive([nbytes]).wait()
        return int(nbytes)

    def _message(self, nbytes: int) -> list[Tensor]:
        """Return a message like an eviction, many tensors at once. They share memory, since nobody reads it."""
        return [self._buffer[:nbytes]] * max(1, nbytes // _BUFFER_BYTES)
