"""ActivationStore: what autograd saved, per micro-batch; it can be counted, shipped, dropped and refilled in place."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

import torch
from evenpipe.runtime.counters import MemoryCounter
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["ActivationStore"]


class _SavedStorage:
    """The only owner of memory that autograd saved. It dies, and stops being counted, with the last handle on it."""

    __slots__ = ("__weakref__", "device", "nbytes", "recording", "shared", "storage", "store")

    def __init__(self, store: "ActivationStore", recording: int, storage: torch.UntypedStorage) -> None:
        self.store = store
        self.recording = recording
        self.shared = False
        self.device = storage.device
        self.nbytes = storage.nbytes()
        self.fill(storage)

    def fill(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.store._owners[storage._cdata] = weakref.ref(self)
        self.store.counter.add_own(self.nbytes)

    def drop(self) -> None:
        if self.storage is not None:
            # Forgotten before the memory is freed: after that its address may name another storage.
            del self.store._owners[self.storage._cdata]
            self.storage = None
            self.store.counter.add_own(-self.nbytes)

    def __del__(self) -> None:
        self.drop()


class _Recording:
    """One micro-batch's saved tensors. Its handles own it, so it dies when autograd has let go of the last one."""

    __slots__ = ("__weakref__", "attached", "away", "departing", "number", "storages", "store")

    def __init__(self, store: "ActivationStore", number: int) -> None:
        self.store = store
        self.number = number
        self.storages: list[weakref.ref[_SavedStorage]] = []
        self.attached: list[weakref.ref[Tensor]] = []
        self.departing: list[_SavedStorage] = []
        self.away: list[tuple[weakref.ref[Tensor], _SavedTensor]] | None = None  # attached tensors that were emptied
        store.counter.add_own_units(1)

    def __del__(self) -> None:
        if self.away is None:
            self.store.counter.add_own_units(-1)


class _SavedTensor:
    """What autograd keeps in place of a tensor: how it lies in a storage, and that storage's owner."""

    __slots__ = ("dtype", "offset", "recording", "saved", "size", "stride")

    def __init__(self, tensor: Tensor, saved: _SavedStorage, recording: _Recording) -> None:
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset()
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.saved = saved
        self.recording = recording  # kept alive until the last handle is gone

    def rebuild(self) -> Tensor:
        storage = self.saved.storage
        if storage is None:
            raise RuntimeError("saved activations are at the partner stage: they must be loaded before their backward")
        empty = torch.empty(0, dtype=self.dtype, device=self.saved.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class ActivationStore:
    """Counts and moves the tensors that autograd saves during `recording`, per micro-batch.

    Memory is counted by storage, once however many tensors or micro-batches saved it, from its first save until the
    last handle on it dies. The store itself holds weak references only: nothing lives longer than under plain autograd.
    Parameters given as `exclude` are neither counted nor moved (their storages are looked up at every recording, so
    their `.data` may change). Tensors that cannot be rebuilt from a storage (subclasses, conjugate or negative views,
    sparse, nested, meta) stay with autograd as they are; `excluded_names` counts their types.

    Autograd's check that a saved tensor was not modified in place does not see through saved-tensor hooks.

    Only storages on `device` are moved; None moves those on any device.
    """

    def __init__(
        self,
        exclude: Iterable[Tensor] = (),
        counter: MemoryCounter | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.counter = counter if counter is not None else MemoryCounter()
        self.excluded_names: Counter[str] = Counter()
        self._excluded = tuple(tensor for tensor in exclude if type(tensor) in (Tensor, torch.nn.Parameter))
        self._device = None if device is None else torch.device(device)
        self._owners: dict[int, weakref.ref[_SavedStorage]] = {}  # by storage address, which the owner keeps valid
        self._recordings: weakref.WeakValueDictionary[Hashable, _Recording] = weakref.WeakValueDictionary()
        self._recorded = 0

    @contextmanager
    def recording(self, key: Hashable) -> Iterator[None]:
        """Record under `key` what autograd saves inside the `with` block; a further block with that key adds to it."""
        recording = self._recordings.get(key)
        if recording is None:
            self._recorded += 1
            recording = self._recordings[key] = _Recording(self, self._recorded)
        with saved_tensors_hooks(self._packer(recording), _unpack):
            del recording  # from here on its handles alone own it (and the hook, while the block lasts)
            yield

    def attach(self, key: Hashable, tensor: Tensor) -> None:
        """Say that `tensor`, which outlives the forward pass, belongs to this micro-batch and may be emptied with it.

        Call it inside or after the recording. Meant for the stage's received input, whose storage can be freed only if
        `tensor` lets go of it too: `release` sets `tensor.data` to an empty tensor and `refill` sets it back. Without
        effect if autograd did not save its storage.
        """
        recording = self._recordings.get(key)
        if recording is not None and all(known() is not tensor for known in recording.attached):
            recording.attached.append(weakref.ref(tensor))

    def shippable(self, key: Hashable) -> list[Tensor]:
        """Return uint8 views of all storages that only this micro-batch holds, in the order they were saved.

        Whatever anybody else holds (another micro-batch, the data set, a module's buffer, a ctx attribute) is left out.
        Begins the departure that `release` completes; the views themselves count as holders, so ask once. Raises
        RuntimeError if this torch cannot tell who holds a storage.
        """
        recording = self._recordings.get(key)
        if recording is None or recording.away is not None:
            return []
        attached = self._attached_by_storage(recording)
        recording.departing = [
            saved
            for reference in recording.storages
            if (saved := reference()) is not None and self._is_exclusive(saved, len(attached.get(id(saved), ())))
        ]
        return [_as_bytes(saved) for saved in recording.departing]

    def release(self, key: Hashable) -> None:
        """Drop the storages that `shippable` returned; their memory is free as soon as the caller drops the views."""
        recording = self._recordings.get(key)
        if recording is None or recording.away is not None:
            return
        attached = self._attached_by_storage(recording)
        recording.away = []
        for saved in recording.departing:
            for tensor in attached.get(id(saved), ()):
                recording.away.append((weakref.ref(tensor), _SavedTensor(tensor, saved, recording)))
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            saved.drop()
            self.counter.add_evicted(saved.nbytes)
        self.counter.add_own_units(-1)

    def refill(self, key: Hashable) -> list[Tensor]:
        """Allocate what `release` dropped and return uint8 views to receive into, in `shippable`'s order and sizes."""
        recording = self._recordings.get(key)
        if recording is None or recording.away is None:
            return []
        departed, recording.departing = recording.departing, []
        emptied, recording.away = recording.away, None
        for saved in departed:
            saved.fill(torch.empty(saved.nbytes, dtype=torch.uint8, device=saved.device).untyped_storage())
        for reference, geometry in emptied:
            if (tensor := reference()) is not None:
                tensor.data = geometry.rebuild()
        self.counter.add_own_units(1)
        return [_as_bytes(saved) for saved in departed]

    def resident(self, key: Hashable) -> bool:
        """Return whether a backward pass could run now: False from `release` to `refill`."""
        recording = self._recordings.get(key)
        return recording is None or recording.away is None

    def nbytes(self, key: Hashable) -> int:
        """Return the live bytes that this micro-batch was the first to save."""
        recording = self._recordings.get(key)
        if recording is None:
            return 0
        owners = [reference() for reference in recording.storages]
        return sum(saved.nbytes for saved in owners if saved is not None and saved.storage is not None)

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

    def discard_all(self) -> None:
        """Forget every micro-batch. Memory that a graph still holds is counted until the graph lets go of it."""
        for recording in list(self._recordings.values()):
            recording.departing = []
        self._recordings.clear()

    def _packer(self, recording: _Recording) -> Callable[[Tensor], object]:
        """Return the hook that records into `recording`. It runs for every saved tensor, so it is kept short."""
        owners, storages, number = self._owners, recording.storages, recording.number
        excluded = {tensor.untyped_storage()._cdata for tensor in self._excluded}
        parameter, strided = torch.nn.Parameter, torch.strided

        def pack(tensor: Tensor) -> object:
            kind = type(tensor)
            if (
                (kind is not Tensor and kind is not parameter)
                or tensor.layout is not strided
                or tensor.is_meta
                or tensor.is_nested
                or tensor.is_conj()
                or tensor.is_neg()
            ):
                self.excluded_names[kind.__name__] += 1
                return _as_is(tensor)
            storage = tensor.untyped_storage()
            address = storage._cdata
            if address in excluded:
                return _as_is(tensor)
            reference = owners.get(address)
            saved = reference() if reference is not None else None
            if saved is None:
                saved = _SavedStorage(self, number, storage)
                storages.append(owners[address])
            elif saved.recording != number:
                saved.shared = True
            return _SavedTensor(tensor, saved, recording)

        return pack

    def _is_exclusive(self, saved: _SavedStorage, attached: int) -> bool:
        """Return whether nobody but `saved` and `attached` tensors holds the storage, in C++ or in Python."""
        storage = saved.storage
        if storage is None or saved.shared or saved.nbytes == 0:
            return False
        if self._device is not None and saved.device != self._device:
            return False
        in_python = sys.getrefcount(storage) - 2  # less this variable and the argument
        return in_python == 1 and _use_count(storage) == 1 + attached

    def _attached_by_storage(self, recording: _Recording) -> dict[int, list[Tensor]]:
        attached: dict[int, list[Tensor]] = {}
        for known in recording.attached:
            if (tensor := known()) is None:
                continue
            reference = self._owners.get(tensor.untyped_storage()._cdata)
            if reference is not None and (saved := reference()) is not None:
                attached.setdefault(id(saved), []).append(tensor)
        return attached


def _unpack(packed: object) -> Tensor:
    if type(packed) is _SavedTensor:
        return packed.rebuild()
    assert isinstance(packed, Tensor)
    return packed


def _as_is(tensor: Tensor) -> Tensor:
    # An alias, because autograd would otherwise hold an output that holds its own node. A leaf has no node, and must
    # itself stay what backward sees: its `.data` may be exchanged until then.
    return tensor if tensor.is_leaf else tensor.detach()


def _as_bytes(saved: _SavedStorage) -> Tensor:
    assert saved.storage is not None
    empty = torch.empty(0, dtype=torch.uint8, device=saved.device)
    return empty.set_(saved.storage, 0, (saved.nbytes,), (1,))


def _use_count(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors and wrappers that hold `storage`; its Python wrapper counts as one."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        raise RuntimeError(
            f"torch {torch.__version__} cannot tell who else holds saved memory (no torch._C._storage_Use_Count), "
            "so nothing can be evicted: use torch 2.6 or newer, or run without BPipe"
        )
    return count(storage._cdata)
