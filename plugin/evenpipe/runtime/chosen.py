"""Saved storages of which the memory is not kept from forward to backward: computed again, or on the host meanwhile."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from evenpipe.runtime.counters import MemoryCounter
from evenpipe.runtime.host_link import HostLink, Passage
from evenpipe.runtime.node_call import NodeCall
from evenpipe.runtime.saved import Geometry, Recording, SavedStorage, SavedTensor

__all__ = ["DroppedStorage", "SwappedStorage"]

_Owners = dict[int, weakref.ref[SavedStorage]]


class _ChosenStorage(SavedStorage):
    """Its handles have the geometry only, so that they keep no memory; that of one version, for it comes back once."""

    __slots__ = ("_version",)
    _version: int
    movable = False

    def handle(self, tensor: Tensor, recording: Recording) -> SavedTensor:
        """Raises RuntimeError if the storage has been changed in place since it was computed, or for a lazy view."""
        if tensor.is_conj() or tensor.is_neg():
            raise RuntimeError(
                f"a conjugate or negative view of size {tuple(tensor.size())} is saved of what is to be swapped or "
                "computed again: resolve it in the model (resolve_conj, resolve_neg)"
            )
        if tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of size {tuple(tensor.size())} that is to be swapped or computed again is changed in place "
                "after it has been computed: leave it out of the plan"
            )
        return SavedTensor(Geometry.of(tensor), tensor._version, self, recording)


class DroppedStorage(_ChosenStorage):
    """Memory that is free with its last user in the forward, and that `call` computes again when it is asked for.

    Until `forget`, at the end of the forward, it is known by the address of its storage.
    """

    __slots__ = ("_address", "_call", "_reference")

    def __init__(
        self, tensor: Tensor, call: NodeCall, number: int, recording: int, owners: _Owners, counter: MemoryCounter
    ) -> None:
        storage = tensor.untyped_storage()
        self.recording, self.owners, self.counter = recording, owners, counter
        self.device, self.nbytes, self.storage = storage.device, storage.nbytes(), None
        self._version, self._call = tensor._version, call
        self._reference: StorageWeakRef | None = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._address = storage._cdata  # which names no other for as long as there is a reference
        owners[self._address] = weakref.ref(self)
        call.made[number] = weakref.ref(self)

    def forget(self) -> None:
        """No more tensors in its storage will be saved."""
        if self._reference is not None:
            del self.owners[self._address]
            self._reference = None

    def awaits(self) -> NodeCall | None:
        """Return the call that computes it again, until that has been."""
        return self._call if self.storage is None else None

    def fetched(self) -> torch.UntypedStorage:
        """Return the memory, computed again if it has not been yet."""
        if self.storage is None:
            self._call.run()
        assert self.storage is not None, "an operation makes again what it has made"
        self.counter.note_peak()
        return self.storage

    def __del__(self) -> None:
        self.forget()
        self.drop()


class SwappedStorage(_ChosenStorage):
    """Memory that leaves for the host when its last user in the forward is done, and comes back for the backward."""

    __slots__ = ("_arriving", "_emptied", "_host", "_leaving", "_link", "_outside", "_read")

    def __init__(self, tensor: Tensor, link: HostLink, recording: int, owners: _Owners, counter: MemoryCounter) -> None:
        super().__init__(tensor.untyped_storage(), recording, owners, counter)
        self._version, self._link = tensor._version, link
        self._leaving: Passage | None = None
        self._read: Passage | None = None  # a copy to the host that nobody wants any more
        self._arriving: Passage | None = None
        self._host: Any = None  # where it is meanwhile, as the link calls it
        self._outside = list[weakref.ref[Tensor]]()
        self._emptied = list[tuple[weakref.ref[Tensor], Geometry]]()

    def attach(self, tensor: Tensor) -> None:
        """Say that `tensor` lies in it and outlives the forward: `let_go` empties it, and it is filled again."""
        self._outside.append(weakref.ref(tensor))

    def leave(self) -> None:
        """Start to copy it to the host."""
        if self.nbytes and self._leaving is None:
            self._leaving = self._link.out(self.view())

    def gone(self) -> None:
        """Have its memory free for what comes next: wait for the copy that has been started."""
        if self._leaving is not None and self.storage is not None:
            self._leaving.wait()
            self._host, self._leaving = self._leaving.target, None
            self.drop()

    def let_go(self) -> None:
        """Once the forward's results are handed on, and it is gone: nothing attached to it holds memory any more."""
        if self._host is None:
            return
        for reference in self._outside:
            if (tensor := reference()) is not None:
                self._emptied.append((reference, Geometry.of(tensor)))
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._outside.clear()

    def recall(self) -> None:
        """Start to bring it back; what has not left yet stays."""
        if self._leaving is not None:
            self._read, self._leaving = self._leaving, None
        if self._host is None:
            return
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self.own(memory.untyped_storage())
        self._arriving, self._host = self._link.back(self._host, memory), None
        for reference, geometry in self._emptied:
            if (tensor := reference()) is not None:
                tensor.data = geometry.over(memory.untyped_storage())
        self._emptied.clear()
        self.counter.note_peak()

    def drop(self) -> None:
        """Let go of the memory; what is still being copied into it, or out of it, is waited for.

        Also a copy out that nobody wants any more: on CUDA it reads on a stream of which the allocator knows nothing.
        Reading what comes next there would do no harm, but the allocator may give the memory back to the device (as it
        does with expandable segments, waiting for the memory's own stream only), and then the read ends the process.
        """
        for passage in (self._arriving, self._leaving, self._read):
            if passage is not None:
                passage.wait()
        self._arriving = self._leaving = self._read = None
        super().drop()

    def fetched(self) -> torch.UntypedStorage:
        """Return the memory, when it is back."""
        self.recall()
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        assert self.storage is not None, "it has been recalled"
        return self.storage
