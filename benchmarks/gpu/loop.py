"""Links both of whose ends are in this process: over NCCL a rank sends to itself, within one coalesced operation.

A rank may send to itself where send and receive are one operation. So a message starts when both ends have posted
theirs, on a stream that waits for what each end's current stream had been given by then: that, and that a stream waits
for a message and not the host, is NCCL's contract between two ranks. A message takes a random while more. Without a GPU
a thread copies, and the host waits.
"""

from __future__ import annotations

import inspect
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Lock
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from evenpipe.runtime import connections
from evenpipe.runtime.channel import Channel
from evenpipe.runtime.connections import Connections
from evenpipe.schedule import Link, Program

__all__ = ["Loops", "Turns", "sleep_on_device"]

_DELAY_SECONDS: Final = 2e-3  # at most
_CYCLES_A_SECOND: Final = 1.5e9  # of a GPU's clock, roughly
_TIMEOUT: Final = timedelta(minutes=1)
_Wait = Callable[[], object]
#: Told what a message has read and written on its carrier's stream.
Seen = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


class Turns:
    """One of the stages' threads runs at a time; whoever waits for a message lets others have their turn."""

    def __init__(self) -> None:
        self.turn = Lock()
        self.failed = Event()

    @contextmanager
    def released(self) -> Iterator[None]:
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()


class _Carrier(Protocol):
    def posted(self) -> Any:
        """Return a mark after all work that this end's current stream has so far."""

    def carry(self, posted: Sequence[Any], sources: Sequence[Tensor], targets: Sequence[Tensor]) -> _Wait:
        """Start a message; what is returned has the current stream wait for it, or the host."""


class _HostCarrier:
    def __init__(self, delays: random.Random) -> None:
        self._thread, self._delays = ThreadPoolExecutor(1), delays

    def posted(self) -> None:
        """The host has computed what comes before."""

    def carry(self, posted: Sequence[Any], sources: Sequence[Tensor], targets: Sequence[Tensor]) -> _Wait:
        seconds = self._delays.uniform(0, _DELAY_SECONDS)

        def copy() -> None:
            time.sleep(seconds)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

        return self._thread.submit(copy).result


class _NcclCarrier:
    def __init__(self, group: Any, device: torch.device, delays: random.Random, seen: Seen | None) -> None:
        self._group, self._delays, self._seen = group, delays, seen
        self._stream = torch.cuda.Stream(device)

    def posted(self) -> Any:
        return torch.cuda.current_stream(self._stream.device).record_event()

    def carry(self, posted: Sequence[Any], sources: Sequence[Tensor], targets: Sequence[Tensor]) -> _Wait:
        with torch.cuda.stream(self._stream):
            for event in posted:
                self._stream.wait_event(event)
            sleep_on_device(self._delays.uniform(0, _DELAY_SECONDS))
            self._group._start_coalescing()
            for source, target in zip(sources, targets, strict=True):
                self._group.send([source], 0, 0)
                self._group.recv([target], 0, 0)
            # From here on torch keeps nothing alive for NCCL: that is left to the channel.
            self._group._end_coalescing().wait()
            if self._seen is not None:
                self._seen(sources, targets)
            through = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._stream.device).wait_event(through)


class _Half:
    """One end of a message, posted; the message starts once the other end is posted too."""

    def __init__(self, name: str, tensors: Sequence[Tensor], posted: Any, turns: Turns, asynchronous: bool) -> None:
        self.tensors, self.posted = tensors, posted
        self.through: Callable[[], object] = lambda: None
        self.started = Event()
        self._name, self._turns, self._asynchronous = name, turns, asynchronous

    def wait(self) -> None:
        if not self._asynchronous:  # the channel has released this thread's turn
            self._wait_for_start()
        elif not self.started.is_set():
            with self._turns.released():
                self._wait_for_start()
        self.through()

    def _wait_for_start(self) -> None:
        end = time.monotonic() + _TIMEOUT.total_seconds()
        while not self.started.wait(0.1):
            if self._turns.failed.is_set() or time.monotonic() > end:
                raise RuntimeError(f"link {self._name}: the other end posted nothing")


class _Wire:
    """Pairs what the two ends of a link post, each in its order."""

    def __init__(self, name: str, carrier: _Carrier, turns: Turns, asynchronous: bool) -> None:
        self._carrier, self._lock = carrier, Lock()
        self._waiting: tuple[deque[_Half], deque[_Half]] = (deque(), deque())
        self._of_half = (turns, asynchronous)
        self._name = name

    def post(self, end: int, tensors: Sequence[Tensor]) -> _Half:
        half = _Half(self._name, tensors, self._carrier.posted(), *self._of_half)
        with self._lock:
            if not self._waiting[1 - end]:
                self._waiting[end].append(half)
                return half
            other = self._waiting[1 - end].popleft()
            source, target = (half, other) if end == 0 else (other, half)
            half.through = other.through = self._carrier.carry(
                [source.posted, target.posted], source.tensors, target.tensors
            )
        half.started.set()
        other.started.set()
        return half


class _End:
    """One end of a wire: what a `Channel` uses of a process group."""

    def __init__(self, wire: _Wire, rank: int) -> None:
        self._wire, self._rank = wire, rank
        self._message: list[Tensor] | None = None

    def rank(self) -> int:
        return self._rank

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        if self._message is None:
            return self._wire.post(self._rank, tensors)
        self._message += tensors
        return None

    recv = send

    def _start_coalescing(self) -> None:
        self._message = []

    def _end_coalescing(self) -> _Half:
        message, self._message = self._message, None
        assert message is not None, "it has been started"
        return self._wire.post(self._rank, message)

    def shutdown(self) -> None:
        """The carriers' groups end with the process."""

    abort = shutdown


class Loops:
    """Links of this rank to itself on one device, over groups of one rank, which are kept from run to run.

    Needs a world of one rank. `seen` is told what each message has read and written.
    """

    def __init__(self, device: torch.device, seen: Seen | None = None) -> None:
        self.device = device
        self._seen = seen
        self._groups: dict[tuple[str, int, int], Any] = {}
        self._delays = random.Random(0)

    def group(self, kind: str, source: int, target: int) -> Any:
        """A group of NCCL with the options of the link's."""
        if (kind, source, target) not in self._groups:
            real, opened = dist.ProcessGroupNCCL, inspect.unwrap(connections._open_group)

            def alone(store: Any, rank: int, size: int, options: Any) -> Any:
                options.global_ranks_in_group = [0]
                return real(store, 0, 1, options)

            alone.Options = real.Options  # type: ignore[attr-defined]
            dist.ProcessGroupNCCL = alone  # type: ignore[misc, assignment]
            try:
                self._groups[kind, source, target] = opened(kind, source, target, "nccl", _TIMEOUT)
            finally:
                dist.ProcessGroupNCCL = real  # type: ignore[misc]
        return self._groups[kind, source, target]

    def close(self) -> None:
        for group in self._groups.values():
            group.shutdown()

    def connected(self, program: Program, turns: Turns) -> list[Connections]:
        """Return each stage's ends of the links of `program`, and of the links between hosts that carry layouts."""
        stages = range(program.schedule.stages)
        every: list[tuple[dict[Link, Channel], dict[Link, Channel]]] = [({}, {}) for _ in stages]
        for link in program.links:
            for which, device in ((0, self.device), (1, torch.device("cpu"))):
                if which and link.kind != "evict":
                    continue
                carrier: _Carrier = _HostCarrier(self._delays)
                if device.type == "cuda":
                    group = self.group(link.kind, link.source, link.target)
                    carrier = _NcclCarrier(group, device, self._delays, self._seen)
                wire = _Wire(f"{link.kind} {link.source} -> {link.target}", carrier, turns, device.type == "cuda")
                for rank, stage in enumerate((link.source, link.target)):
                    end = Channel(link.source, link.target, _End(wire, rank), device, turns.released)
                    every[stage][which][link] = end
        return [Connections(channels, layouts) for channels, layouts in every]


def sleep_on_device(seconds: float) -> None:
    """Have the current stream do nothing for about so long."""
    torch.cuda._sleep(int(seconds * _CYCLES_A_SECOND))
