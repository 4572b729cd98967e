"""Streams and events of a device that does nothing: each carries a vector clock of the work that comes before it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final

import torch

__all__ = ["Clock", "Device", "Event", "Stream"]

#: Of a stream, by its number: how much of its work is known to be done.
Clock = dict[int, int]

_DEALT: Final = 32  # in turn, of each priority (c10/cuda/CUDAStream.cpp, kStreamsPerPool)


def _merge(into: Clock, other: Clock) -> None:
    for stream, done in other.items():
        into[stream] = max(into.get(stream, 0), done)


class Event:
    """A moment in a stream's work."""

    def __init__(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)
        self._device = stream.of
        self._seconds = time.monotonic()

    def synchronize(self) -> None:
        _merge(self._device.host.clock, self.clock)

    def elapsed_time(self, end: Event) -> float:
        return (end._seconds - self._seconds) * 1e3


class Stream:
    """Work in order. Its own entry of `clock` counts the work that it has been given."""

    def __init__(self, of: Device, number: int) -> None:
        self.of = of
        self.number = number
        self.clock: Clock = {number: 0}
        self.device = torch.device("cpu")

    def give(self) -> None:
        """Count one more piece of work, which the host gives after all that it has seen done."""
        _merge(self.clock, self.of.host.clock)
        self.clock[self.number] += 1

    @property
    def cuda_stream(self) -> int:
        """The handle, by which streams that torch has dealt twice are one."""
        return self.number

    def wait_event(self, event: Event) -> None:
        _merge(self.clock, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        _merge(self.clock, stream.clock)

    def record_event(self) -> Event:
        return Event(self)

    def synchronize(self) -> None:
        _merge(self.of.host.clock, self.clock)

    def __repr__(self) -> str:
        return f"stream {self.number}" if self.number else "the host"


class Device:
    """The streams of one device: its default one, and those dealt in turn out of 32 a priority. Its host counts too."""

    def __init__(self) -> None:
        self._numbers = count()
        self.host = Stream(self, next(self._numbers))
        self.default = self.current = Stream(self, next(self._numbers))
        self._pools: dict[str, list[Stream]] = {}
        self._given: dict[str, int] = {}

    def deal(self, priority: str) -> Stream:
        """Return the next stream of a pool; the 33rd is the first again."""
        pool = self._pools.setdefault(priority, [])
        turn = self._given[priority] = self._given.get(priority, 0) + 1
        if len(pool) < _DEALT:
            pool.append(Stream(self, next(self._numbers)))
        return pool[(turn - 1) % _DEALT]

    @property
    def streams(self) -> list[Stream]:
        """All that there are."""
        return [self.default, *(stream for pool in self._pools.values() for stream in pool)]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before
