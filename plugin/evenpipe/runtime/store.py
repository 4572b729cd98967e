"""ActivationStore: what autograd saved, per micro-batch; it can be counted, shipped, dropped and refilled in place."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from evenpipe.runtime import streams
from evenpipe.runtime.memory import MemoryCounter
from evenpipe.runtime.movable import may_depart
from evenpipe.runtime.saved import (
    Departure,
    Destination,
    Geometry,
    Recording,
    SavedStorage,
    SavedTensor,
    bytes_of,
    composed,
    lasting_bytes,
    plain_parts,
    unpacked,
)

__all__ = [
    "PIECE_BYTES",
    "SMALL_BYTES",
    "ActivationStore",
    "Recorder",
    "grouped",
    "memory_for",
    "packed",
    "taken",
    "unpack",
]

# What CUDA's caching allocator keeps apart as small (kSmallSize): what packing frees is for small storages again. A
# network card of 25 GB/s takes 40 µs for as much, several times what it costs to start an operation.
SMALL_BYTES: Final = 2**20
# A piece and what is packed into it, or out of it, are there together for a moment, beyond any bound: 0.02 % of 80 GiB.
PIECE_BYTES: Final = 2**24


def grouped(storages: Iterable[SavedStorage]) -> list[list[SavedStorage]]:
    """Group the storages that travel as one tensor: a large one by itself, small ones up to `PIECE_BYTES` together."""
    groups: list[list[SavedStorage]] = []
    piece: list[SavedStorage] = []
    room = 0
    for saved in storages:
        if saved.nbytes >= SMALL_BYTES:
            groups.append([saved])
            continue
        if saved.nbytes > room:
            piece, room = [], PIECE_BYTES
            groups.append(piece)
        piece.append(saved)
        room -= saved.nbytes
    return groups


def packed(group: Sequence[SavedStorage]) -> Tensor:
    """Return all bytes of a group in a row, copied in stream order; one storage alone is not copied."""
    views = [saved.view() for saved in group]
    return views[0] if len(views) == 1 else torch.cat(views)


def taken(group: Sequence[SavedStorage], vacated: list[UntypedStorage]) -> Tensor | None:
    """Take memory of a group's size as `packed` out of what was `vacated`; return None where there is none."""
    nbytes, device = _nbytes(group), group[0].device
    for at, storage in enumerate(vacated):
        if storage.nbytes() == nbytes and storage.device == device:
            return bytes_of(vacated.pop(at))
    return None


def memory_for(group: Sequence[SavedStorage], vacated: list[UntypedStorage]) -> Tensor:
    """Return room for a group as `packed`: what is `taken`, or else new; contents undefined."""
    room = taken(group, vacated)
    return torch.empty(_nbytes(group), dtype=torch.uint8, device=group[0].device) if room is None else room


def unpack(tensor: Tensor, group: Sequence[SavedStorage]) -> None:
    """Give each storage of a group its bytes again: memory of its own, copied in stream order, unless it is alone."""
    if len(group) == 1:
        group[0].own(tensor.untyped_storage())
        return
    room = [torch.empty(saved.nbytes, dtype=torch.uint8, device=saved.device) for saved in group]
    for saved, memory in zip(group, room, strict=True):
        saved.own(memory.untyped_storage())
    torch._foreach_copy_(room, tensor.split_with_sizes([saved.nbytes for saved in group]))


def _nbytes(group: Iterable[SavedStorage]) -> int:
    return sum(saved.nbytes for saved in group)


_HOST = torch.device("cpu")
_LOOKS = 5
_LOOK_SECONDS = 0.001


class Recorder(NamedTuple):
    """The hooks of an open recording, and the storages that are known by their addresses."""

    recording: Recording
    pack: Callable[[Tensor], object]
    unpack: Callable[[object], Tensor]
    owners: dict[int, weakref.ref[SavedStorage]]
    counter: MemoryCounter


class ActivationStore:
    """Counts and moves the tensors that autograd saves during `recording`, per micro-batch.

    Memory is counted by storage, once however many tensors or micro-batches saved it, from its first save until the
    last handle on it dies; what was emptied during the recording, to be computed anew in backward, counts as nothing.
    The store itself holds weak references only: nothing lives longer than under plain autograd.
    Parameters given as `exclude` are neither counted nor moved (their storages are looked up at every recording, so
    their `.data` may change). A tensor that consists of others (`composed`) is taken apart, and what it consists of is
    counted and moved. Other subclasses and tensors without a storage (sparse) stay with autograd as they are;
    `lasting_bytes` has, by type, the most bytes that one micro-batch has in them. Conjugate, negative, nested and meta
    tensors, and those that torch quantized, are counted but never moved. Only storages on `device` are moved; None
    moves those on any device.
    What a layer saves on a stream of its own is counted, and stays: a load's memory is of the current stream's pool,
    which would hand it on while that stream still reads it in the backward. `aside_bytes`: the most of a micro-batch.
    """

    def __init__(
        self,
        exclude: Iterable[Tensor] = (),
        counter: MemoryCounter | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.counter = counter if counter is not None else MemoryCounter()
        self.lasting_bytes: Counter[str] = Counter()
        self.aside_bytes = 0
        self._excluded = tuple(exclude)
        self._device = None if device is None else torch.device(device)
        self._owners: dict[int, weakref.ref[SavedStorage]] = {}
        self._recordings: weakref.WeakValueDictionary[Hashable, Recording] = weakref.WeakValueDictionary()
        self._recorded = 0
        self._most: dict[Hashable, int] = {}  # storages that have been sealed at once, by what micro-batches are like

    @contextmanager
    def recording(self, key: Hashable) -> Iterator[None]:
        """Record under `key` what autograd saves inside the `with` block; a further block with that key adds to it."""
        recording = self._recordings.get(key)
        if recording is None:
            self._recorded += 1
            recording = self._recordings[key] = Recording(self._recorded, self.counter)
        with saved_tensors_hooks(self._packer(recording), unpacked):
            yield
        for saved in recording.by_storage():
            saved.remeasure()
        self.lasting_bytes |= recording.lasting
        self.counter.note_peak()

    def recorder(self, key: Hashable) -> Recorder:
        """Return the hooks for a forward that chooses what it keeps. Raises RuntimeError outside the recording."""
        recording = self._recordings.get(key)
        if recording is None:
            raise RuntimeError(f"micro-batch {key}: what is to be recomputed or swapped is chosen inside its recording")
        return Recorder(recording, self._packer(recording), unpacked, self._owners, self.counter)

    def attach(self, key: Hashable, tensor: Tensor) -> None:
        """Say that `tensor`, which outlives the forward pass, belongs to this micro-batch and may be emptied with it.

        Call it inside or after the recording. Meant for the stage's received input, whose storage can be freed only if
        `tensor` lets go of it too: `release` sets `tensor.data` to an empty tensor and `refill` sets it back. Without
        effect if autograd did not save its storage.
        """
        recording = self._recordings.get(key)
        if recording is not None and all(known() is not tensor for known in recording.attached):
            recording.attached.append(weakref.ref(tensor))

    def seal(
        self,
        key: Hashable,
        like: Hashable = None,
        for_host: Callable[[Sequence[SavedStorage]], set[SavedStorage]] = lambda sealed: set(),
    ) -> tuple[int, ...]:
        """Decide what of this micro-batch can move: all storages that nobody else holds. Return their sizes in bytes.

        Of these, `for_host` chooses those that are to go to the host.
        Call it right after the forward pass, before its outputs are handed on: later on, messages hold what they carry.
        Whatever anybody else holds (another micro-batch, the data set, a module's buffer, a ctx attribute) is left out.
        On the host, a collective's thread lets go of its tensors a little after it has been waited for: where fewer
        could move than of those `like` it before, look again a few times. Raises RuntimeError if this torch cannot tell
        who holds a storage.
        """
        recording = self._recordings.get(key)
        if recording is None:
            return ()
        handles = recording.by_storage()
        sealed = self._free_to_move(recording, handles)
        for _ in range(_LOOKS if self._device == _HOST else 0):
            if len(sealed) >= self._most.get(like, 0):
                break
            time.sleep(_LOOK_SECONDS)
            sealed = self._free_to_move(recording, handles)
        self._most[like] = max(len(sealed), self._most.get(like, 0))
        chosen = for_host(sealed)
        for to, leaving in recording.departures.items():
            leaving.sealed = [weakref.ref(saved) for saved in sealed if (saved in chosen) == (to == "host")]
        aside = sum(saved.nbytes for saved in handles if saved.movable and saved.aside)
        self.aside_bytes = max(self.aside_bytes, aside)
        return tuple(saved.nbytes for saved in sealed)

    def movable_bytes(self, key: Hashable) -> int:
        """Return what of this micro-batch can move. Call it when `seal` may be called, which it is, if it was not."""
        recording = self._recordings.get(key)
        if recording is None:
            return 0
        sealed = [reference for leaving in recording.departures.values() for reference in leaving.sealed]
        if not sealed:
            return sum(self.seal(key))
        return sum(saved.nbytes for reference in sealed if (saved := reference()) is not None)

    def ship(self, key: Hashable, to: Destination = "partner") -> list[Tensor]:
        """Make a message, of uint8 tensors, of what `seal` decided to send there; `release` ends the departure.

        Large storages travel as they are. Small ones are packed, which is enqueued on the current stream, and their
        memory is free at once. From now on until `unpack` a backward of this micro-batch is refused.
        """
        recording = self._recordings.get(key)
        if recording is None or (leaving := recording.departures[to]).away:
            return []
        if not leaving.groups:
            leaving.groups = grouped(saved for reference in leaving.sealed if (saved := reference()) is not None)
            handles = recording.by_storage() if leaving.groups else {}
            for group in leaving.groups:
                tensor = packed(group)
                for saved in group:
                    _empty(saved, handles.get(saved, ()), recording, leaving)
                leaving.carry(tensor)
        return list(leaving.message)

    def release(self, key: Hashable, to: Destination = "partner") -> list[torch.UntypedStorage]:
        """Let go of what `ship` made, and return its memory, which is free with that and the message's tensors."""
        recording = self._recordings.get(key)
        if recording is None or (leaving := recording.departures[to]).away:
            return []
        vacated = [leaving.put_down().untyped_storage() for _ in leaving.message.copy()]
        leaving.away = True
        nbytes = sum(storage.nbytes() for storage in vacated)
        if to == "host":
            self.counter.swapped_bytes += nbytes
        else:
            self.counter.evicted_bytes += nbytes
            self.counter.add_own_units(-1)
        return vacated

    def fits(self, key: Hashable, vacated: Iterable[torch.UntypedStorage]) -> bool:
        """Return whether all that `refill` would need is among what has been `vacated`, or nothing has been."""
        recording = self._recordings.get(key)
        room = list(vacated)
        if recording is None or not (coming := recording.departures["partner"]).away or not room:
            return True
        return all(taken(group, room) is not None for group in coming.groups)

    def refill(
        self, key: Hashable, vacated: Iterable[torch.UntypedStorage] = (), origin: Destination = "partner"
    ) -> list[Tensor]:
        """Find memory to receive what `ship` made into: uint8 tensors of the same number and sizes.

        Of what another micro-batch has `vacated`, memory of the same size is used again; the rest is allocated.
        """
        recording = self._recordings.get(key)
        if recording is None or not (coming := recording.departures[origin]).away:
            return []
        room = list(vacated)
        for group in coming.groups:
            coming.carry(memory_for(group, room))
        coming.away = False
        if origin == "partner":
            self.counter.add_own_units(1)
        self.counter.note_peak()
        return list(coming.message)

    def unpack(self, key: Hashable, origin: Destination = "partner") -> None:
        """Put what was received into `refill`'s memory where it belongs: this micro-batch is here again.

        What was packed is copied, on the current stream, and the memory that it arrived in is free at once.
        """
        recording = self._recordings.get(key)
        if recording is None or (coming := recording.departures[origin]).away:
            return
        groups, coming.groups = coming.groups, []
        emptied, coming.emptied = coming.emptied, []
        handles = recording.by_storage()
        for group in groups:
            unpack(coming.put_down(), group)
            for saved in group:
                assert saved.storage is not None, "it has been unpacked"
                for handle in handles.get(saved, ()):
                    handle.fill(saved.storage)
        for reference, geometry, saved in emptied:
            if (tensor := reference()) is not None and saved.storage is not None:
                tensor.data = geometry.over(saved.storage)

    def nbytes(self, key: Hashable) -> int:
        """Return the live bytes that this micro-batch was the first to save."""
        recording = self._recordings.get(key)
        if recording is None:
            return 0
        mine = (saved for saved in recording.by_storage() if saved.recording == recording.number)
        return sum(saved.nbytes for saved in mine if saved.storage is not None)

    def leftover(self) -> list[Hashable]:
        """Return the keys of which autograd still holds something, here or at the partner."""
        return list(self._recordings)

    def assert_empty(self) -> None:
        """Raise RuntimeError, naming the micro-batches, if anything that was saved is still alive."""
        if self._recordings or self._owners:
            keys = ", ".join(str(key) for key in self._recordings) or "unknown"
            raise RuntimeError(
                f"saved activations outlive the batch: {self.counter.own_bytes} bytes of micro-batches {keys}; "
                "run their backward or drop every tensor of their graphs"
            )

    def _packer(self, recording: Recording) -> Callable[[Tensor], object]:
        """Return the hook that records into `recording`. It runs for every saved tensor, so it is kept short.

        It must not own the recording: a collective started inside the block carries the hooks in force along, and lets
        go of them whenever its thread gets to it.
        """
        owners, handles, number, counter = self._owners, recording.handles, recording.number, self.counter
        excluded = {part.untyped_storage()._cdata for tensor in self._excluded for part in plain_parts(tensor)}
        parameter, strided, weak = torch.nn.Parameter, torch.strided, weakref.ref
        recorded_by, lasting = weakref.ref(recording), recording.lasting
        del recording
        device = self._device or _HOST
        home = streams.current(device) if streams.is_asynchronous(device) else None

        def plain(tensor: Tensor) -> object:
            storage = tensor.untyped_storage()
            address = storage._cdata
            if address in excluded:
                return _as_is(tensor)
            reference = owners.get(address)
            saved = reference() if reference is not None else None
            if saved is None:
                saved = SavedStorage(storage, number, owners, counter)
            if home is not None and streams.current(device) != home:
                saved.aside = True
            recording = recorded_by()
            assert recording is not None, "the block that installed this hook keeps the recording"
            handle = saved.handle(tensor, recording)
            handles.append(weak(handle))
            return handle

        def lasts(tensor: Tensor) -> object:
            name, nbytes = lasting_bytes(tensor)
            lasting[name] += nbytes
            return _as_is(tensor)

        def pack(tensor: Tensor) -> object:
            kind = type(tensor)
            if (kind is Tensor or kind is parameter) and tensor.layout is strided:
                return plain(tensor)
            if any(part.untyped_storage()._cdata in excluded for part in plain_parts(tensor)):
                return _as_is(tensor)
            return composed(tensor, plain, lasts)

        return pack

    def _free_to_move(
        self, recording: Recording, handles: Mapping[SavedStorage, Sequence[SavedTensor]]
    ) -> list[SavedStorage]:
        return [
            saved
            for saved, own in handles.items()
            if self._device in (None, saved.device)
            and may_depart(saved, [*(handle.tensor for handle in own), *recording.attached_to(saved)])
        ]


def _empty(saved: SavedStorage, handles: Iterable[SavedTensor], recording: Recording, leaving: Departure) -> None:
    """Have nobody hold this storage any more: neither handles nor the tensors attached to its micro-batch."""
    for tensor in recording.attached_to(saved):
        leaving.emptied.append((weakref.ref(tensor), Geometry.of(tensor), saved))
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    for handle in handles:
        handle.drop()
    saved.drop()


def _as_is(tensor: Tensor) -> Tensor:
    # An alias, because autograd would otherwise hold an output that holds its own node. A leaf has no node, and must
    # itself stay what backward sees: its `.data` may be exchanged until then.
    return tensor if tensor.is_leaf else tensor.detach()
