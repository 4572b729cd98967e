"""WeightVersions: two versions of a stage's parameters, each in memory of its own; or one, written in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from evenpipe.runtime.saved import Geometry
from evenpipe.schedule import required_version

__all__ = ["Alias", "WeightVersions"]


class Alias(NamedTuple):
    """An attribute of `owner` that holds a view of the parameters' memory, such as a flat buffer."""

    owner: Any
    attribute: str


class _View(NamedTuple):
    """An attribute that looks at the parameters' memory, and what it sees in either memory."""

    alias: Alias
    tensors: tuple[Tensor, Tensor]

    def point_at(self, memory: int) -> None:
        owner, attribute = self.alias
        setattr(owner, attribute, self.tensors[memory])


class WeightVersions:
    """Two memories for the parameters (PipeDream-2BW §3.1): a version keeps its memory until it is overwritten.

    Version v is in memory v % 2. `use` points the parameters' `.data` at a version; `writing` makes the next one, over
    the version before the present: an optimizer changes parameters in place. What a forward has saved of a version,
    leaves or views, stays true until that version is overwritten.

    The second memory is one copy of the storages that `parameters` lie in. `others` are further tensors, and `aliases`
    attributes, that lie in the same storages and that the optimizer reads or writes (shards, flat buffers): they always
    point at the newest version. Tensors elsewhere are left alone. `buffers` have versions as parameters have.

    in_place: each version is written over the one before, in the parameters' own memory (PACI). A backward uses the
    newest where its forward saved the parameter, and an older one where that saved a copy, such as autocast's cast.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        others: Iterable[Tensor] = (),
        aliases: Iterable[Alias] = (),
        buffers: Iterable[Tensor] = (),
        in_place: bool = False,
    ) -> None:
        trained = {id(tensor): tensor for tensor in parameters}
        self._trained = len(trained)
        self._parameters = [*trained.values(), *buffers]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self._parameters}
        copies = storages if in_place else {address: _copy_of(storage) for address, storage in storages.items()}
        self._memories = () if in_place else tuple((storages[address], copies[address]) for address in storages)

        def view(alias: Alias, tensor: Tensor) -> _View:
            address, geometry = tensor.untyped_storage()._cdata, Geometry.of(tensor)
            return _View(alias, (geometry.over(storages[address]), geometry.over(copies[address])))

        self._used = [view(Alias(tensor, "data"), tensor) for tensor in self._parameters]
        known = {id(tensor) for tensor in self._parameters}
        inside = [
            tensor for tensor in others if tensor.untyped_storage()._cdata in storages and id(tensor) not in known
        ]
        self._written = [view(Alias(tensor, "data"), tensor) for tensor in inside]
        for alias in aliases:
            tensor = getattr(alias.owner, alias.attribute)
            if tensor is not None and tensor.untyped_storage()._cdata in storages:
                self._written.append(view(alias, tensor))
        self._stepped = tuple({id(tensor): tensor for tensor in (*self._parameters, *inside)}.values())
        self.in_place = in_place
        self.latest = 0
        self.peak = 1
        self._swap = 0  # version v is in memory (v + swap) % 2
        self._in_use = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of the second memory."""
        return sum(storage.nbytes() for storage, _ in self._memories)

    @property
    def memory(self) -> list[Tensor]:
        """Return the parameters of both versions."""
        return [tensor for view in self._used for tensor in view.tensors]

    def needed(self, batch: int) -> int:
        """Return the version that a micro-batch of `batch` is computed with now."""
        return self.latest if self.in_place else required_version(batch)

    def use(self, version: int) -> None:
        """Point the parameters at `version`: the newest, or the one before."""
        kept = (self.latest - 1, self.latest)
        if version not in kept:
            raise RuntimeError(f"version {version} of the weights is asked for, and {kept} are kept")
        memory = self._memory_of(version)
        if memory != self._in_use:
            self._in_use = memory
            for view in self._used:
                view.point_at(memory)
            torch.clear_autocast_cache()  # which knows a parameter by its address, not by its memory

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, everything points at the version after the newest, which begins as a copy of that.

        Changes made in place inside do not disturb backward passes that are still to come: these use older versions.
        Raises RuntimeError when a parameter has been given other memory inside: the versions would not see it again.
        """
        old, new = self._memory_of(self.latest), self._memory_of(self.latest + 1)
        for memories in self._memories:
            memories[new].copy_(memories[old], non_blocking=True)
        self.latest += 1
        self.peak = 1 if self.in_place else 2
        self.use(self.latest)
        for view in self._written:
            view.point_at(new)
        with _unsafe_preserve_version_counter(self._stepped):
            yield
        if self.in_place:
            torch.clear_autocast_cache()
        for view in (*self._used, *self._written):
            if getattr(*view.alias).data_ptr() != view.tensors[new].data_ptr():
                raise RuntimeError(
                    f"{'paci' if self.in_place else '2bw'}: the optimizer has given a parameter other memory instead "
                    "of changing it in place, so that its versions would be lost: use an optimizer that writes in place"
                )

    def tensors(self, version: int) -> list[Tensor]:
        """Return the parameters of `version`, then the buffers, in the order they were given; views of its memory."""
        memory = self._memory_of(version)
        return [view.tensors[memory] for view in self._used]

    def trained(self, version: int) -> list[Tensor]:
        """Return the parameters alone."""
        return self.tensors(version)[: self._trained]

    def restart(self, latest: int, before: Sequence[Tensor] | None) -> None:
        """Call what the parameters hold now version `latest`, and the version before it `before` (None: the same)."""
        newest = self._memory_of(self.latest)
        assert self._in_use == newest, "the parameters do not point at their newest version"
        self._swap = (newest - latest) % 2
        self.latest = latest
        for memories in self._memories:
            memories[1 - newest].copy_(memories[newest])
        if before is not None:
            for tensor, value in zip(self.tensors(latest - 1), before, strict=True):
                tensor.copy_(value)
            self.peak = 2

    def _memory_of(self, version: int) -> int:
        return 0 if self.in_place else (version + self._swap) % 2


def _copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copy = torch.UntypedStorage(storage.nbytes(), device=storage.device)  # type: ignore[no-untyped-call]
    return copy.copy_(storage)
