"""Channel: one directed first-in-first-out link between two ranks, with a group of its own; Layouts of messages."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from threading import Lock, Thread
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.utils import dlpack

from evenpipe.runtime import streams

__all__ = ["Awaiting", "Channel", "Group", "Layouts", "Transfer", "shapes_received", "shapes_sent", "unrecorded"]


class _Work(Protocol):
    def wait(self) -> object: ...


class Group(Protocol):
    """The part of `ProcessGroupGloo` and `ProcessGroupNCCL` that a channel uses."""

    def rank(self) -> int: ...
    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> _Work: ...
    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> _Work: ...
    def shutdown(self) -> None: ...
    def abort(self) -> None: ...
    def _start_coalescing(self) -> None: ...
    def _end_coalescing(self) -> _Work: ...


Awaiting = Callable[[], AbstractContextManager[object]]


class Transfer:
    """A message under way. Its tensors are kept alive until it has been waited for."""

    __slots__ = ("_awaiting", "_lock", "_tensors", "_works")

    def __init__(self, works: Sequence[_Work], tensors: Sequence[Tensor], awaiting: Awaiting = nullcontext) -> None:
        self._works = works
        self._tensors = tensors
        self._awaiting = awaiting  # is entered while the host waits
        self._lock = Lock()

    def wait(self) -> None:
        """Wait until the message is through; waiting again does nothing.

        On CPU (gloo) this blocks the host. On CUDA (NCCL) the current stream waits and the host goes on: work enqueued
        later on the current stream may use, reuse or free the tensors. Raises RuntimeError if the peer is gone, and
        SilentPeer if nothing came within the timeout.
        """
        if self._works:
            with self._awaiting():
                self.finish()

    def finish(self) -> None:
        """Wait as `wait` does, in a thread beside the host's own; nobody learns whom it awaits."""
        with self._lock:
            self.hold_up_stream()
            self._works = self._tensors = ()

    def hold_up_stream(self) -> None:
        """On CUDA, have the current stream wait until the message is through; its tensors are kept alive as before."""
        for work in self._works:
            work.wait()


class Channel:
    """A directed link `source` -> `target` (global ranks) over a two-rank `group` that nothing else uses.

    In the group the source has rank 0 and the target rank 1. Messages arrive in the order they were sent; each is a
    list of tensors whose number, sizes and dtypes the receiver must know. Empty tensors are skipped on both sides.
    """

    def __init__(
        self,
        source: int,
        target: int,
        group: Group,
        device: torch.device | str,
        awaiting: Awaiting = nullcontext,
    ) -> None:
        self.source = source
        self.target = target
        self.device = torch.device(device)
        self._group = group
        self._is_source = group.rank() == 0
        self._waits_on_host = not streams.is_asynchronous(self.device)
        self._awaiting = awaiting if self._waits_on_host else nullcontext
        # When nobody has it any more, or the interpreter ends.
        self._end: weakref.finalize[..., Channel] = weakref.finalize(self, _end, group)
        self._posted_later: _PostedLater | None = None

    @functools.cached_property
    def side(self) -> streams.Stream:
        """Return the stream on which a receive waits for transfers before it; opened when first asked for."""
        return streams.opened(self.device)

    def send(self, tensors: Sequence[Tensor]) -> Transfer:
        """Start sending `tensors`.

        The message is taken from the memory the tensors have now: the caller may set their `.data`, but must not write
        to that memory before the transfer has been waited for. A tensor that is not contiguous is copied. Raises
        ValueError at the target's end.
        """
        if not self._is_source:
            raise ValueError(f"channel {self.source} -> {self.target}: the target cannot send; open the opposite one")
        aliases = [self._alias(tensor.detach().contiguous()) for tensor in tensors if tensor.numel()]
        return self._start(self._group.send, 1, aliases)

    def receive(self, buffers: Sequence[Tensor], after: Sequence[Transfer] = ()) -> Transfer:
        """Start receiving into `buffers`, as soon as all transfers `after` which it comes are through.

        Neither host nor current stream wait for those. Raises ValueError for a buffer that is not contiguous, and at
        the source's end.
        """
        if self._is_source:
            raise ValueError(
                f"channel {self.source} -> {self.target}: the source cannot receive; open the opposite one"
            )
        if not all(buffer.is_contiguous() for buffer in buffers):
            raise ValueError("a channel receives into contiguous buffers only: pass one and copy from it")
        aliases = [self._alias(buffer.detach()) for buffer in buffers if buffer.numel()]
        if self._waits_on_host:
            return self._receive_on_host(aliases, after)
        if not after:
            return self._start(self._group.recv, 0, aliases)
        # What follows on the communicator's stream waits for what this stream has been given.
        self.side.wait_stream(streams.current(self.device))
        with streams.on(self.side):
            for transfer in after:
                transfer.hold_up_stream()
            return self._start(self._group.recv, 0, aliases)

    def _receive_on_host(self, aliases: list[Tensor], after: Sequence[Transfer]) -> Transfer:
        earlier = self._posted_later
        if not after and (earlier is None or earlier.is_posted):
            return self._start(self._group.recv, 0, aliases)
        first = [*([earlier.posted] if earlier else []), *(transfer.finish for transfer in after)]
        later = self._posted_later = _PostedLater(first, lambda: self._start(self._group.recv, 0, aliases))
        return Transfer([later], aliases, self._awaiting)

    def give_up(self) -> None:
        """A batch has failed: whatever is under way will not end, and the group's end does not wait for it."""
        if self._end.detach():
            self._end = weakref.finalize(self, self._group.abort)

    def close(self) -> None:
        """Destroy the group, once every transfer has been waited for or given up. The channel is of no use then."""
        self._end()

    def _alias(self, tensor: Tensor) -> Tensor:
        """Return what keeps the memory of `tensor`: on the host, where no stream is recorded, itself."""
        return tensor if self._waits_on_host else unrecorded(tensor)

    def _start(self, operation: _Operation, peer: int, tensors: list[Tensor]) -> Transfer:
        if not tensors:
            return Transfer((), ())
        if self._waits_on_host:
            return Transfer([operation([tensor], peer, 0) for tensor in tensors], tensors, self._awaiting)
        # Coalesced, a message is one NCCL kernel, on the stream of this group's own communicator.
        self._group._start_coalescing()
        for tensor in tensors:
            operation([tensor], peer, 0)
        return Transfer([self._group._end_coalescing()], tensors)


def unrecorded(tensor: Tensor) -> Tensor:
    """Return all bytes of a contiguous `tensor`, as an alias that keeps them and that torch's allocator does not know.

    `ProcessGroupNCCL::pointToPoint` has the caching allocator record its stream on what it moves: in 2.6 whatever
    TORCH_NCCL_AVOID_RECORD_STREAMS says (pytorch #132292), and still after collectives have ceased to (#148590, which
    stash what they move instead). Recorded memory that has been freed can be used again only when the host has seen an
    event of that stream, and the host runs ahead: memory would come back late. `recordStream` passes by what another
    deleter than the allocator's frees (CUDACachingAllocator.cpp: `ptr.get_deleter() != &local_raw_delete`), as DLPack's
    does. Nothing is lost by it, whether a release records or not: a Transfer keeps the alias until its stream has been
    told to wait, so the memory is free no earlier, for work that comes later on that stream.
    """
    memory = tensor.view(-1).view(torch.uint8)
    if not streams.records_any_address(tensor.device):
        return memory  # asserts that it knows what is recorded (CUDAMallocAsyncAllocator.cpp: "ptr not found")
    alias: Tensor = dlpack.from_dlpack(torch._C._to_dlpack(memory))
    return alias


class _PostedLater:
    """A message on the host, posted by a thread as soon as what comes `first` has returned."""

    def __init__(self, first: Sequence[Callable[[], object]], post: Callable[[], Transfer]) -> None:
        self._transfer: Transfer | None = None
        self._error: Exception | None = None
        # Of a rank that fails, a thread whose peer is silent must not hold up the end.
        self._thread = Thread(target=self._run, args=(first, post), daemon=True)
        self._thread.start()

    @property
    def is_posted(self) -> bool:
        return self._transfer is not None

    def posted(self) -> Transfer:
        """Return the message once it is under way. Raises what kept it from being posted."""
        self._thread.join()
        if self._transfer is None:
            assert self._error is not None, "the thread has ended"
            raise self._error
        return self._transfer

    def wait(self) -> None:
        self.posted().finish()

    def _run(self, first: Sequence[Callable[[], object]], post: Callable[[], Transfer]) -> None:
        try:
            for wait in first:
                wait()
            self._transfer = post()
        except Exception as error:
            self._error = error


class _Operation(Protocol):
    def __call__(self, tensors: list[Tensor], peer: int, tag: int, /) -> _Work: ...


def _end(group: Group) -> None:
    """Destroy `group`; where an error ends the process, without a wait for what never comes."""
    if getattr(sys, "last_value", None) is None:
        group.shutdown()
    else:
        group.abort()


_UNDER_WAY: Final = 4
#: Numbers that every layout sends, so that a short one is one message: what is packed for a partner has few sizes.
_HEAD: Final = 32


class Layouts:
    """Sizes in bytes of the tensors in which an evicted micro-batch travels; or whole numbers that describe the tensors
    that one stage gives the next.

    No two need be alike: who holds a storage for a moment, and what a router or a packed sequence made of the data,
    differs from one to the next. They travel between the hosts, and no device waits for them. The sender sends
    them when it starts to send, where the receiver starts to receive: one place in the order of both.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending: deque[Transfer] = deque()

    def send(self, sizes: Sequence[int]) -> None:
        """Send what the next message consists of, when its sending starts."""
        # The receiver has taken those of a few messages ago, and little is kept alive for it.
        if len(self._sending) >= _UNDER_WAY:
            self._sending.popleft().wait()
        numbers = torch.tensor([len(sizes), *sizes], dtype=torch.int64)
        head = torch.zeros(_HEAD, dtype=torch.int64)
        head[: len(numbers)] = numbers[:_HEAD]
        self._sending.append(self._channel.send([head, numbers[_HEAD:]]))

    def receive(self) -> tuple[int, ...]:
        """Wait for what the next message consists of, and return it."""
        head = torch.empty(_HEAD, dtype=torch.int64)
        self._channel.receive([head]).wait()
        count, *sizes = head.tolist()
        rest = torch.empty(max(0, count - len(sizes)), dtype=torch.int64)
        self._channel.receive([rest]).wait()
        return (*sizes[:count], *rest.tolist())


def shapes_sent(tensors: Sequence[Tensor]) -> list[int]:
    """Return the shapes of `tensors` as numbers for `shapes_received`."""
    return [number for tensor in tensors for number in (tensor.dim(), *tensor.shape)]


def shapes_received(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shapes that `shapes_sent` gave as `numbers`."""
    rest, shapes = iter(numbers), []
    for dimensions in rest:
        shapes.append(tuple(islice(rest, dimensions)))
    return shapes
