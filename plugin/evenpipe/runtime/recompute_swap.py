"""What a part of a model recomputes or swaps to the host between its forward and its backward, storage by storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from evenpipe.runtime.host_memory import HostLink, Passage
from evenpipe.runtime.memory import MemoryCounter
from evenpipe.runtime.node_call import NodeCall, call_noting
from evenpipe.runtime.saved import Geometry, Recording, SavedStorage, SavedTensor
from evenpipe.runtime.store import ActivationStore, Recorder

__all__ = [
    "PLAIN_CALLER",
    "DroppedStorage",
    "Keeper",
    "Keeping",
    "KeepingCaller",
    "NodeCaller",
    "Scope",
    "SwappedStorage",
]

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
        """Empty what is attached to it, once the forward's results are handed on and it is gone."""
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


#: Gives for an operation's ordinal the context in which it draws its numbers.
Scope = Callable[[int], AbstractContextManager[object]]


@dataclass(frozen=True)
class Keeping:
    """The work of a part of a model for each micro-batch, in numbers of a profile's nodes and storages.

    again: nodes that run again in the backward. dropped: storages that they make, and that are then computed again.
    swapped: storages that are on the host meanwhile. made: of the nodes that make one of these, all that they make, and
    its bytes: saved ones in the order of saving, then returned ones. ordinals: of random nodes.
    out, gone: after which nodes a swapped storage starts to leave, and is waited for. back: before the backward of
    which nodes it starts to come back; early: before the backward starts.
    """

    again: Set[int] = frozenset()
    dropped: Set[int] = frozenset()
    swapped: Set[int] = frozenset()
    made: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    ordinals: Mapping[int, int] = field(default_factory=dict)
    out: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    gone: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    back: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    early: tuple[int, ...] = ()

    @property
    def nodes(self) -> frozenset[int]:
        """Return the nodes that have to be called through a `KeepingCaller`."""
        return frozenset(self.again).union(self.made, self.out, self.gone, self.back)

    def sizes_on_host(self, received: Sequence[int]) -> list[int]:
        """Return the bytes of each storage that a micro-batch may have on the host.

        `received`: those of the tensors that the part is given, of which the plan does not say which it swaps.
        """
        made = {number: nbytes for storages in self.made.values() for number, nbytes in storages}
        sizes = [made[number] for number in sorted(self.swapped) if number in made]
        return sizes if len(sizes) == len(self.swapped) else [*sizes, *received]


class NodeCaller:
    """Calls nodes, and leaves to autograd what is kept."""

    def __call__(self, node: int, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what `op` returns."""
        return op(*args, **kwargs)

    def given(self, number: int, tensor: Tensor) -> Tensor:
        """`tensor` itself."""
        return tensor

    def output(self, name: str, tensor: Tensor) -> None:
        """Take note of what the model returns beside its loss, under that name; nothing while it trains."""


PLAIN_CALLER = NodeCaller()


class KeepingCaller(NodeCaller):
    """Calls nodes in one micro-batch's forward, and keeps of what they save what `keeping` says."""

    def __init__(self, keeping: Keeping, recorder: Recorder, link: HostLink, scope: Scope) -> None:
        self._keeping = keeping
        self._recorder = recorder
        self._link = link
        self._scope = scope
        self.storages: dict[int, SavedStorage] = {}

    def __call__(self, node: int, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what `op`, the operation of a node, returns for these arguments.

        Raises RuntimeError where it allocates other storages than the profile says.
        """
        keeping = self._keeping
        call = None
        if node in keeping.again:
            call = NodeCall(node, op, args, kwargs, self._recorder.pack, self._scope_of(node))
        result = self._make(node, call, op, args, kwargs) if node in keeping.made else op(*args, **kwargs)
        for saved in self.swapped(keeping.out.get(node, ())):
            saved.leave()
        for saved in self.swapped(keeping.gone.get(node, ())):
            saved.gone()
        if node in keeping.back:
            _bring_back(result, [weakref.ref(saved) for saved in self.swapped(keeping.back[node])])
        return result

    def given(self, number: int, tensor: Tensor) -> Tensor:
        """`tensor` itself, in a storage that the part is given, and that has this number."""
        if number in self._keeping.swapped:
            self._record(number, tensor).attach(tensor)
        return tensor

    def _make(
        self, node: int, call: NodeCall | None, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        keeping, recorder = self._keeping, self._recorder
        found, expected = list[int](), iter(keeping.made[node])

        def note(tensor: Tensor) -> None:
            place, nbytes = len(found), tensor.untyped_storage().nbytes()
            found.append(nbytes)
            number = next((number for number, planned in expected if planned == nbytes), -1)
            if number in keeping.swapped:
                self._record(number, tensor)
            elif number in keeping.dropped:
                assert call is not None, "what is dropped is made by a node that runs again"
                self.storages[number] = DroppedStorage(
                    tensor, call, place, recorder.recording.number, recorder.owners, recorder.counter
                )
            elif number < 0:
                odd.append(nbytes)

        odd = list[int]()
        result = call_noting(lambda: op(*args, **kwargs), (args, kwargs), note, recorder.pack, recorder.unpack)
        if odd:  # fewer are copies that a received tensor's layout has made unnecessary
            sizes = [nbytes for _, nbytes in keeping.made[node]]
            raise RuntimeError(
                f"node {node} allocates {found} bytes, and its plan says {sizes}: make a plan on a profile of this "
                "device, precision and micro-batch size"
            )
        return result

    def _record(self, number: int, tensor: Tensor) -> SwappedStorage:
        recorder = self._recorder
        saved = SwappedStorage(tensor, self._link, recorder.recording.number, recorder.owners, recorder.counter)
        self.storages[number] = saved
        return saved

    def swapped(self, numbers: Iterable[int]) -> Iterator[SwappedStorage]:
        """Give the storages of these that are on the host from forward to backward."""
        for number in numbers:
            if isinstance(saved := self.storages.get(number), SwappedStorage):
                yield saved

    def _scope_of(self, node: int) -> Callable[[], AbstractContextManager[object]]:
        ordinal = self._keeping.ordinals.get(node)
        return nullcontext if ordinal is None else partial(self._scope, ordinal)


class Keeper:
    """Gives each forward of a stage its `KeepingCaller`, and moves what is swapped to its host and back."""

    def __init__(self, store: ActivationStore, device: torch.device, link: HostLink | None = None) -> None:
        self._store = store
        self.link = link if link is not None else HostLink(device)
        self._units: dict[Hashable, _Swaps] = {}
        self._leaving: list[weakref.ref[SwappedStorage]] = []

    @contextmanager
    def forward(self, unit: Hashable, keeping: Keeping, scope: Scope) -> Iterator[KeepingCaller]:
        """Inside the store's recording of the unit: what its nodes are called through.

        What earlier micro-batches have left on the link is gone first.
        """
        for saved in _alive(self._leaving):
            saved.gone()
            saved.let_go()
        keep = KeepingCaller(keeping, self._store.recorder(unit), self.link, scope)
        yield keep
        for storage in keep.storages.values():
            if isinstance(storage, DroppedStorage):
                storage.forget()
        self._leaving = [weakref.ref(saved) for saved in keep.swapped(keep.storages)]
        if self._leaving:
            early = [weakref.ref(saved) for saved in keep.swapped(keeping.early)]
            self._units[unit] = _Swaps(self._leaving, early)

    def swap_out(self, unit: Hashable) -> None:
        """Let go of what has gone to the host, when the forward's results are handed on."""
        if unit in self._units:
            for saved in _alive(self._units[unit].swapped):
                saved.let_go()

    def swap_in(self, unit: Hashable) -> None:
        """Start to bring back what the backward needs too soon to be brought back beside it."""
        if unit in self._units:
            for saved in _alive(self._units.pop(unit).early):
                saved.recall()

    def forget(self) -> None:
        """Forget what has been forwarded, as it is never backwarded."""
        self._units.clear()
        self._leaving.clear()


def _bring_back(result: Any, coming: Iterable[weakref.ref[SwappedStorage]]) -> None:
    """Recall them when the backward comes to the node of `result`; without a gradient there, when asked for."""

    def recall(gradient: Tensor) -> None:
        for saved in _alive(coming):
            saved.recall()

    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(recall)  # type: ignore[no-untyped-call]
            break


class _Swaps(NamedTuple):
    swapped: list[weakref.ref[SwappedStorage]]
    early: list[weakref.ref[SwappedStorage]]


def _alive(references: Iterable[weakref.ref[SwappedStorage]]) -> Iterator[SwappedStorage]:
    return (saved for reference in references if (saved := reference()) is not None)
