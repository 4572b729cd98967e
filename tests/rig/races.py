"""Reports accesses to memory that no stream, event or allocator orders, while CPU tensors stand for a device's.

Every operation on tensors is work of the current stream, or of the host where all its tensors are the host's. An access
is a race unless the clock of its stream knows the accesses before it. The caching allocator's rule: a block that is
free is at once free to the stream that it was allocated on. So whoever else uses a block has to come after all that
this stream had been given when it was allocated (READ, WRITE), and a stream that allocates memory has to know the
accesses to its blocks that are free by then (REUSE). Pinned memory is kept until somebody has waited for its copies.
"""

from __future__ import annotations

import bisect
import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.rig.clocks import Device, Stream

__all__ = ["Crossings", "Memory", "Operations", "place", "unseen"]

_ROOMS: Final = ("/evenpipe/", "/tests/")
_VIEWS: Final = {"detach", "set_", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh"}
_NEW: Final = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
#: The host waits for the current stream, to learn a value or how large a result is.
_AWAITED: Final = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}


#: Of a storage, by its address: whether nobody has it. Asked of all for every operation.
_expired: Final[Any] = torch._C.StorageBase._expired


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, no operation is seen."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


class _Access(NamedTuple):
    start: int
    end: int
    stream: Stream
    number: int
    does: str
    where: str

    def is_known_to(self, stream: Stream) -> bool:
        return stream is self.stream or stream.clock.get(self.stream.number, 0) >= self.number


class _Block:
    """Memory of one allocation, and the accesses that may still be under way."""

    def __init__(self, storage: torch.UntypedStorage, stream: Stream, where: str) -> None:
        self.start, self.end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        self.stream = stream
        allocated = _Access(self.start, self.end, stream, stream.clock[stream.number], "allocates", where)
        self.accesses = [allocated]
        self.recorded: set[Stream] = set()
        self.reference = StorageWeakRef(storage)

    @property
    def is_free(self) -> bool:
        return bool(self.reference.expired())


class Memory:
    """All blocks of a device and its host. `races` has a line for each kind and pair of places."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.races: dict[str, None] = {}
        self._blocks: dict[int, _Block] = {}  # by address
        self._starts: list[int] = []
        self._storages: dict[int, int] = {}
        self._freed: list[_Block] = []

    def read(self, tensor: Tensor, stream: Stream, where: str) -> None:
        """`stream` reads `tensor`, in the work that it has been given last."""
        self._access(tensor, stream, where, "reads")

    def write(self, tensor: Tensor, stream: Stream, where: str) -> None:
        """`stream` writes it."""
        self._access(tensor, stream, where, "writes")

    def record(self, tensor: Tensor, stream: Stream) -> None:
        """Have the allocator wait for what `stream` does until `tensor` is free."""
        if (block := self.block_of(tensor)) is not None:
            block.recorded.add(stream)

    def allocated(self, tensor: Tensor, stream: Stream, where: str) -> bool:
        """Note the memory of `tensor`, of the pool of `stream`, if it is new; return whether it is."""
        storage = tensor.untyped_storage()
        if not storage.nbytes() or self._find(storage.data_ptr()) is not None:
            return False
        self._reuse(stream, where)
        block = self._blocks[storage.data_ptr()] = _Block(storage, stream, where)
        bisect.insort(self._starts, block.start)
        self._storages[block.start] = block.reference.cdata
        return True

    def is_of_host(self, tensor: Tensor) -> bool:
        """Whether the memory of `tensor` is the host's, as pinned memory is."""
        block = self.block_of(tensor)
        return block is not None and block.stream is self.device.host

    def block_of(self, tensor: Tensor) -> _Block | None:
        """The block that `tensor` lies in, maybe as another storage's memory."""
        return self._find(tensor.data_ptr()) if tensor.numel() else None

    def sweep(self) -> None:
        """Take notice of what has been freed."""
        for start in [start for start, storage in self._storages.items() if _expired(storage)]:
            block = self._blocks.pop(start)
            self._starts.remove(start)
            del self._storages[start]
            if block.stream is self.device.host:
                self._let_go(block)
            else:
                self._freed.append(block)

    def _find(self, address: int) -> _Block | None:
        if (place := bisect.bisect(self._starts, address) - 1) < 0:
            return None
        block = self._blocks[self._starts[place]]
        return block if address < block.end else None

    def _reuse(self, stream: Stream, where: str) -> None:
        for block in [block for block in self._freed if block.stream is stream]:
            self._freed.remove(block)
            for access in block.accesses:
                if access.stream not in block.recorded and not access.is_known_to(stream):
                    self._report("REUSE", where, stream, access)
                    break

    def _let_go(self, block: _Block) -> None:
        """Pinned memory is the host's again; copies that nobody has waited for are saved by its allocator alone."""
        current = self.device.current
        for access in block.accesses:
            waited_for = access.stream is not current and access.is_known_to(current)
            if not waited_for and not access.is_known_to(self.device.host):
                self._report("REUSE", place("pinned memory is let go of"), self.device.host, access)

    def _access(self, tensor: Tensor, stream: Stream, where: str, does: str) -> None:
        if (block := self.block_of(tensor)) is None:
            return
        writes = does == "writes"
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        mine = _Access(start, start + extent * tensor.element_size(), stream, stream.clock[stream.number], does, where)
        kept = []
        for other in block.accesses:
            overlaps = other.start < mine.end and mine.start < other.end
            if overlaps and (writes or other.does != "reads") and not other.is_known_to(stream):
                self._report(does.upper()[:-1], where, stream, other)
            covered = mine.start <= other.start and other.end <= mine.end
            if not (covered and (writes or (other.stream is stream and other.does == "reads"))):
                kept.append(other)
        block.accesses = [*kept, mine]

    def _report(self, kind: str, where: str, stream: Stream, other: _Access) -> None:
        line = f"{kind} by {where} on {stream}, not ordered after {other.where}, which {other.does} on {other.stream}"
        self.races[line] = None


class Operations(TorchDispatchMode):
    """Gives every operation to the current stream, or to the host, and fills memory that is handed out with NaNs."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        memory, name, kwargs = self._memory, op._overloadpacket.__name__, kwargs or {}
        stream, where = memory.device.current, place(name)
        memory.sweep()
        if not (op.is_view or name in _VIEWS or name in _NEW):
            stream = self._work(op, args, kwargs, stream, where)
        result = op(*args, **kwargs)
        for tensor in tree_leaves(result):
            if _is_dense(tensor) and memory.allocated(tensor, stream, where):
                if name in _NEW:
                    poison(tensor)
                else:
                    memory.write(tensor, stream, where)
        return result

    def _work(self, op: Any, args: Any, kwargs: Any, stream: Stream, where: str) -> Stream:
        """Whoever does the work, which has been given to it."""
        memory, name, taken = self._memory, op._overloadpacket.__name__, list(_taken(op, args, kwargs))
        for tensor, _ in taken:
            memory.allocated(tensor, stream, where)
        of_host = [memory.is_of_host(tensor) for tensor, _ in taken]
        if of_host and all(of_host):
            stream = memory.device.host
        stream.give()
        for tensor, writes in taken:
            (memory.write if writes else memory.read)(tensor, stream, where)
        blocks = name == "copy_" and any(of_host) and not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if blocks or name in _AWAITED or (name == "index" and _by_mask(args)):
            stream.synchronize()
        return stream


class Crossings(TorchFunctionMode):
    """What passes between a device and its host, which on a CPU takes no operation."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, memory = kwargs or {}, self._memory
        name = getattr(function, "__name__", "")
        if name == "as_tensor" and not isinstance(args[0], Tensor):
            with unseen():
                result = function(*args, **kwargs)
            memory.allocated(result, memory.device.host, place(name))
            return result
        if name == "to" and _names_device(args, kwargs) and memory.is_of_host(args[0]):
            there = torch.empty_like(args[0])
            return there.copy_(args[0], non_blocking=kwargs.get("non_blocking", False))
        if name in ("cpu", "tolist", "numpy") and _is_dense(args[0]):
            stream = memory.device.host if memory.is_of_host(args[0]) else memory.device.current
            stream.give()
            memory.read(args[0], stream, place(name))
            stream.synchronize()
            if name == "cpu":
                with unseen():
                    result = args[0].clone()
                memory.allocated(result, memory.device.host, place(name))
                return result
        return function(*args, **kwargs)


def poison(tensor: Tensor) -> None:
    """Fill the memory of `tensor` with ones, which are NaNs of every floating-point type."""
    storage = tensor.untyped_storage()
    ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())


def place(what: str) -> str:
    """`what`, and the line of EvenPipe or of a test that has it done."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(room in name for room in _ROOMS) and "/rig/" not in name:
            return f"{what} ({name.rpartition('/')[2]}:{frame.f_lineno})"
        frame = frame.f_back
    return what


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta


def _names_device(args: Any, kwargs: Any) -> bool:
    return isinstance(kwargs.get("device", args[1] if len(args) > 1 else None), (torch.device, str))


def _taken(op: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that an operation takes, and whether it writes to them."""
    for number, argument in enumerate(op._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        yield from ((leaf, writes) for leaf in tree_leaves(value) if _is_dense(leaf))


def _by_mask(args: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.dtype is torch.bool for leaf in tree_leaves(args[1:]))
