"""What autograd holds in place of a saved tensor: handles on storages, and tensors that consist of plain ones."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from evenpipe.runtime.memory import MemoryCounter

__all__ = [
    "APART",
    "Composition",
    "Departure",
    "Destination",
    "Geometry",
    "Recording",
    "SavedComposition",
    "SavedStorage",
    "SavedTensor",
    "bytes_of",
    "composed",
    "lasting_bytes",
    "plain_parts",
    "storages_of",
    "unpacked",
]


class Geometry(NamedTuple):
    """A tensor's place in its storage: all that is kept of it while its storage is away."""

    dtype: torch.dtype
    device: torch.device
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        """Describe `tensor`."""
        return cls(tensor.dtype, tensor.device, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor that lies so in `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return all of `storage` as a uint8 tensor."""
    return Geometry(torch.uint8, storage.device, 0, (storage.nbytes(),), (1,)).over(storage)


class SavedStorage:
    """Memory that autograd saved. Its handles own it: it dies, and stops being counted, with the last of them.

    `owners` finds it by the address of its storage, which stays valid for as long as it is listed there.
    `movable`: it may be sent to the partner stage, if nobody else holds it. `aside`: a layer's own stream saved it, and
    uses it in the backward in an order of its own.
    """

    __slots__ = ("__weakref__", "aside", "counter", "device", "nbytes", "owners", "recording", "storage")
    storage: torch.UntypedStorage | None
    movable = True

    def __init__(
        self,
        storage: torch.UntypedStorage,
        recording: int,
        owners: dict[int, weakref.ref[SavedStorage]],
        counter: MemoryCounter,
    ) -> None:
        self.recording = recording  # number of the first recording that saved it
        self.owners = owners
        self.counter = counter
        self.device = storage.device
        self.nbytes = storage.nbytes()
        self.aside = False
        self.own(storage)

    def handle(self, tensor: Tensor, recording: Recording) -> SavedTensor:
        """Return what autograd shall hold in place of `tensor`, which lies in the storage."""
        alias = tensor.detach()
        return SavedTensor(alias, alias._version, self, recording)

    def fetched(self) -> torch.UntypedStorage:
        """Return the memory, for a backward. Raises RuntimeError if it is not here."""
        if self.storage is None:
            raise RuntimeError(
                "saved activations are at the partner stage or on the host: they must be loaded before their backward"
            )
        return self.storage

    def awaits(self) -> Any:
        """Return what has to run before `fetched` finds its memory computed, if anything (`NodeCall`)."""
        return None

    def view(self) -> Tensor:
        """Return all bytes of the storage as a uint8 tensor."""
        assert self.storage is not None
        return bytes_of(self.storage)

    def drop(self) -> None:
        """Let go of the memory and count it no more."""
        if self.storage is not None:
            # Forgotten before the memory is freed: after that its address may name another storage.
            del self.owners[self.storage._cdata]
            self.storage = None
            self.counter.add_own(-self.nbytes)

    def remeasure(self) -> None:
        """Count what the storage has become: whoever saved it may have emptied it, to compute it anew in backward."""
        if self.storage is not None and (nbytes := self.storage.nbytes()) != self.nbytes:
            self.counter.add_own(nbytes - self.nbytes)
            self.nbytes = nbytes

    def own(self, storage: torch.UntypedStorage) -> None:
        """Hold this memory, and count it."""
        self.storage = storage
        self.owners[storage._cdata] = weakref.ref(self)
        self.counter.add_own(self.nbytes)

    def __del__(self) -> None:
        self.drop()


class SavedTensor:
    """The handle: an alias of the saved tensor, or its geometry while the storage is away.

    An alias shares its tensor's version counter, by which autograd's in-place check goes on working.
    """

    __slots__ = ("__weakref__", "recording", "saved", "tensor", "version")

    def __init__(self, tensor: Tensor | Geometry, version: int, saved: SavedStorage, recording: Recording) -> None:
        self.tensor = tensor
        self.version = version
        self.saved = saved
        self.recording = recording

    def unpack(self) -> Tensor:
        """Return the saved tensor. Raises RuntimeError if it is away or was modified in place since it was saved."""
        tensor = self.tensor
        if isinstance(tensor, Geometry):
            return tensor.over(self.saved.fetched())
        if tensor._version != self.version:
            raise RuntimeError(
                f"a saved tensor of size {tuple(tensor.size())} was modified in place before its backward: it is at "
                f"version {tensor._version}, expected {self.version}; set_detect_anomaly(True) names the operation"
            )
        return tensor

    def drop(self) -> None:
        """Keep the geometry only."""
        if isinstance(self.tensor, Tensor):
            self.tensor = Geometry.of(self.tensor)

    def fill(self, storage: torch.UntypedStorage) -> None:
        """Be an alias again, now of `storage`."""
        if isinstance(self.tensor, Geometry):
            self.tensor = self.tensor.over(storage)
            self.version = self.tensor._version


#: Where saved activations are between forward and backward, if not on their device: partner stage or own host.
Destination: TypeAlias = Literal["partner", "host"]


class Departure:
    """The storages of one micro-batch that leave together, and how far they have come."""

    __slots__ = ("away", "counter", "emptied", "groups", "message", "sealed")

    def __init__(self, counter: MemoryCounter) -> None:
        self.counter = counter
        self.sealed: list[weakref.ref[SavedStorage]] = []  # what may depart
        # What has departed and is not back: the storages that travel as one tensor, for each tensor of the message; and
        # the attached tensors that have lost their memory.
        self.groups: list[list[SavedStorage]] = []
        self.emptied: list[tuple[weakref.ref[Tensor], Geometry, SavedStorage]] = []
        self.message: list[Tensor] = []  # that departs or arrives, while its memory is here
        self.away = False

    def carry(self, tensor: Tensor) -> None:
        """Make `tensor` the next one of the message, and count it."""
        self.message.append(tensor)
        self.counter.add_own(tensor.numel())

    def put_down(self) -> Tensor:
        """Take the first tensor out of the message, and count it no more."""
        self.counter.add_own(-self.message[0].numel())
        return self.message.pop(0)


class Recording:
    """One micro-batch's saved tensors. Its handles own it, so it dies when autograd has let go of the last one."""

    __slots__ = (
        "__weakref__",
        "attached",
        "counter",
        "departures",
        "handles",
        "lasting",
        "number",
    )

    def __init__(self, number: int, counter: MemoryCounter) -> None:
        self.number = number
        self.counter = counter
        self.handles: list[weakref.ref[SavedTensor]] = []
        self.attached: list[weakref.ref[Tensor]] = []
        self.lasting: Counter[str] = Counter()  # bytes that stay with autograd, by type
        self.departures: dict[Destination, Departure] = {"partner": Departure(counter), "host": Departure(counter)}
        counter.add_own_units(1)

    def by_storage(self) -> dict[SavedStorage, list[SavedTensor]]:
        """Return the live handles, in the order they were saved, under their storages."""
        handles: dict[SavedStorage, list[SavedTensor]] = {}
        for reference in self.handles:
            if (handle := reference()) is not None:
                handles.setdefault(handle.saved, []).append(handle)
        return handles

    def attached_to(self, saved: SavedStorage) -> list[Tensor]:
        """Return the attached tensors that lie in this storage."""
        tensors = [tensor for reference in self.attached if (tensor := reference()) is not None]
        return [tensor for tensor in tensors if tensor.untyped_storage() is saved.storage]

    def __del__(self) -> None:
        for departure in self.departures.values():
            while departure.message:
                departure.put_down()
        if not self.departures["partner"].away:
            self.counter.add_own_units(-1)


PLAIN: Final = (Tensor, torch.nn.Parameter)


class Composition(NamedTuple):
    """The tensors of which a tensor consists, and the function that puts it together again."""

    parts: list[Tensor]
    together: Callable[[Sequence[Tensor]], Tensor]


def _flattened(tensor: Tensor) -> Composition | None:
    """By torch's own protocol, `__tensor_flatten__`."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, context = tensor.__tensor_flatten__()
    kind, size, stride = type(tensor), tensor.size(), tensor.stride()

    def together(parts: Sequence[Tensor]) -> Tensor:
        tensor_again: Tensor = kind.__tensor_unflatten__(dict(zip(names, parts, strict=True)), context, size, stride)
        return tensor_again

    return Composition([getattr(tensor, name) for name in names], together)


def _quantized(tensor: Tensor) -> Composition | None:
    """Transformer Engine's `QuantizedTensor` (2.0 to 2.18: `get_metadata` has what one consists of), its flags as well.

    Its own way to make one (`make_like`) takes a transpose that is out of date for a valid one.
    """
    if not all(hasattr(tensor, name) for name in ("get_metadata", "prepare_for_saving", "restore_from_saved")):
        return None
    metadata = tensor.get_metadata()  # type: ignore[attr-defined]
    consists = {id(value) for value in metadata.values() if isinstance(value, Tensor)}
    state = dict(vars(tensor))
    names = [name for name, value in state.items() if id(value) in consists]
    parts = [state.pop(name) for name in names]
    kind, size, stride, dtype, device = type(tensor), tensor.size(), tensor.stride(), tensor.dtype, tensor.device

    def together(parts: Sequence[Tensor]) -> Tensor:
        tensor_again: Tensor = Tensor._make_wrapper_subclass(kind, size, strides=stride, dtype=dtype, device=device)
        vars(tensor_again).update(state, **dict(zip(names, parts, strict=True)))
        return tensor_again

    return Composition(parts, together)


#: Every way to take a tensor apart. Each gives None for a tensor that it is not for; the first that does not, counts.
APART: Final[tuple[Callable[[Tensor], Composition | None], ...]] = (_flattened, _quantized)


def _taken_apart(tensor: Tensor) -> Composition | None:
    """Return what `tensor` consists of; None for a plain one, and for one of which that is not known.

    A ragged tensor is known by the object that its lengths are in, so that another of the same lengths is no match.
    """
    if type(tensor) in PLAIN or tensor.layout is not torch.strided:
        return None
    compositions = (composition for way in APART if (composition := way(tensor)) is not None)
    return next((composition for composition in compositions if composition.parts), None)


def plain_parts(value: object) -> Iterator[Tensor]:
    """Give the tensors with memory that `value` consists of: itself, where it is one that cannot be taken apart."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        if (composition := _taken_apart(value)) is None:
            yield value
        else:
            for part in composition.parts:
                yield from plain_parts(part)


class SavedComposition:
    """The handle of a tensor that has been taken apart: the handles of its parts.

    The tensor's own version counter is looked at for as long as anybody holds the tensor; parts have theirs.
    """

    __slots__ = ("_together", "_version", "_whole", "held")

    def __init__(self, whole: Tensor, held: Sequence[object], together: Callable[[Sequence[Tensor]], Tensor]) -> None:
        self.held = held
        self._together = together
        self._whole = weakref.ref(whole)
        self._version = whole._version

    def unpack(self) -> Tensor:
        """Return the tensor. Raises RuntimeError if a part is away, or it was modified in place since it was saved."""
        whole = self._whole()
        if whole is not None and whole._version != self._version:
            raise RuntimeError(
                f"a saved {type(whole).__name__} of size {tuple(whole.size())} was modified in place before its "
                f"backward: it is at version {whole._version}, expected {self._version}"
            )
        return self._together([unpacked(one) for one in self.held])


def composed(tensor: Tensor, plain: Callable[[Tensor], object], lasts: Callable[[Tensor], object]) -> object:
    """Return what is held in place of `tensor`: `plain` of its parts, `lasts` of what cannot be taken apart."""
    if (composition := _taken_apart(tensor)) is None:
        return plain(tensor) if type(tensor) in PLAIN and tensor.layout is torch.strided else lasts(tensor)
    return SavedComposition(tensor, [composed(part, plain, lasts) for part in composition.parts], composition.together)


def unpacked(held: object) -> Tensor:
    """Return the tensor that autograd, or an operation to be run again, holds so."""
    if isinstance(held, SavedTensor | SavedComposition):
        return held.unpack()
    assert isinstance(held, Tensor)
    return held


def storages_of(held: object) -> Iterator[SavedStorage]:
    """Give the storages of what is held so."""
    if isinstance(held, SavedTensor):
        yield held.saved
    elif isinstance(held, SavedComposition):
        for one in held.held:
            yield from storages_of(one)


_INDICES: Final = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def lasting_bytes(tensor: Tensor) -> tuple[str, int]:
    """Return the type, or layout, of a tensor that cannot be taken apart, and the bytes that it is seen to have."""
    if tensor.layout in _INDICES:
        parts = [getattr(tensor, name)() for name in _INDICES[tensor.layout]]
        return str(tensor.layout), sum(part.nbytes for part in parts)
    parts = [value for value in vars(tensor).values() if isinstance(value, Tensor)] or [tensor]
    return type(tensor).__name__, sum(part.nbytes for part in parts)
