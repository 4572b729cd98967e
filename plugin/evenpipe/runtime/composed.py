"""Tensors that consist of plain ones: how they are taken apart, and put together again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from evenpipe.runtime.saved import SavedStorage, SavedTensor

__all__ = [
    "APART",
    "Composition",
    "SavedComposition",
    "composed",
    "lasting_bytes",
    "plain_parts",
    "storages_of",
    "unpacked",
]

_PLAIN: Final = (Tensor, torch.nn.Parameter)


class Composition(NamedTuple):
    """The tensors that one consists of, and how it is made of such again."""

    parts: list[Tensor]
    together: Callable[[Sequence[Tensor]], Tensor]


def _flattened(tensor: Tensor) -> Composition | None:
    """By torch's own protocol, `__tensor_flatten__`."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, context = tensor.__tensor_flatten__()
    kind, size, stride = type(tensor), tensor.size(), tensor.stride()

    def together(parts: Sequence[Tensor]) -> Tensor:
        made: Tensor = kind.__tensor_unflatten__(dict(zip(names, parts, strict=True)), context, size, stride)
        return made

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
        made: Tensor = Tensor._make_wrapper_subclass(kind, size, strides=stride, dtype=dtype, device=device)
        vars(made).update(state, **dict(zip(names, parts, strict=True)))
        return made

    return Composition(parts, together)


#: Every way to take a tensor apart. Each gives None for a tensor that it is not for; the first that does not, counts.
APART: Final[tuple[Callable[[Tensor], Composition | None], ...]] = (_flattened, _quantized)


def _taken_apart(tensor: Tensor) -> Composition | None:
    """Return what `tensor` consists of; None for a plain one, and for one of which that is not known.

    A ragged tensor is known by the object that its lengths are in, so that another of the same lengths is no match.
    """
    if type(tensor) in _PLAIN or tensor.layout is not torch.strided:
        return None
    found = (composition for way in APART if (composition := way(tensor)) is not None)
    return next((composition for composition in found if composition.parts), None)


def plain_parts(value: object) -> Iterator[Tensor]:
    """Give the tensors with memory that `value` consists of: itself, where it is one that cannot be taken apart."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        if (composition := _taken_apart(value)) is None:
            yield value
        else:
            for part in composition.parts:
                yield from plain_parts(part)


class SavedComposition:
    """What autograd shall hold in place of a tensor that has been taken apart: what it shall hold of each part.

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
        return plain(tensor) if type(tensor) in _PLAIN and tensor.layout is torch.strided else lasts(tensor)
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
