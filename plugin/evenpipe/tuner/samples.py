"""The loader's samples, in micro-batches of another size, and whether a batch's loss is the same however it is cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from evenpipe.runtime.resources import highest_of_all

__all__ = ["CutError", "LossWeights", "items_of", "loader_of", "micro_batches_of"]

_MASK: Final = "loss_mask"


class CutError(ValueError):
    """Micro-batches that have been read cannot be made ones of another size; the message is one line."""


def micro_batches_of(size: int, given: int, source: Iterator[Any] | None) -> Iterator[Any] | None:
    """Micro-batches of `size` samples with those that `source` has in micro-batches of `given`, in the same order.

    A micro-batch is a nest of dicts, lists and tuples of tensors whose first dimension are the samples; None stands for
    what there is not. `source` is read as late as can be: of a batch that both sizes divide, nothing is left over.
    Where nothing is to be cut it is handed over as it is, None (a process that reads nothing) too. Reading raises
    CutError for what has no such dimension, or is not alike in micro-batches that are to be joined.
    """
    return source if source is None or size == given else _Cut(size, given, source)


def loader_of(given: Any) -> Iterator[Any] | None:
    """The loader in `given`, which is one, or a list of one; None where this process reads nothing."""
    source: Iterator[Any] | None = given[0] if isinstance(given, list) else given
    return source if source is None or hasattr(source, "__iter__") else items_of(source)


def items_of(source: Iterator[Any]) -> Iterator[Any]:
    """Yield what `source` has, even if only `next` works on it, as on Megatron's RerunDataIterator."""
    while True:
        try:
            item = next(source)
        except StopIteration:
            return
        yield item


class _Read(NamedTuple):
    """A micro-batch that has been read, by leaves, and the first of its samples that has not been handed over."""

    leaves: list[Tensor | None]
    tree: pytree.TreeSpec
    first: int

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return what has to be the same for samples to be joined."""
        return self.tree, [leaf if leaf is None else (leaf.dtype, leaf.shape[1:]) for leaf in self.leaves]

    def samples(self, end: int) -> list[Tensor | None]:
        return [leaf if leaf is None else leaf[self.first : end] for leaf in self.leaves]


class _Cut(Iterator[Any]):
    def __init__(self, size: int, given: int, source: Iterator[Any]) -> None:
        self._size = size
        self._given = given
        self._source = source
        self._left: _Read | None = None

    def __next__(self) -> Any:
        read = first = self._left or self._read()
        pieces: list[list[Tensor | None]] = []
        missing = self._size
        while True:
            end = min(self._given, read.first + missing)
            pieces.append(read.samples(end))
            missing -= end - read.first
            self._left = read._replace(first=end) if end < self._given else None
            if not missing:
                return pytree.tree_unflatten([_joined(parts) for parts in zip(*pieces, strict=True)], read.tree)
            read = self._read()
            if read.kind != first.kind:
                raise CutError(f"{self._cannot}: one that follows another has other tensors, or other shapes")

    def _read(self) -> _Read:
        paths, tree = pytree.tree_flatten_with_path(next(self._source))
        for path, leaf in paths:
            if leaf is not None and not (isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == self._given):
                found = f"of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
                raise CutError(
                    f"{self._cannot}: {pytree.keystr(path) or 'it'} ({found}) is no tensor of {self._given} samples"
                )
        return _Read([leaf for _, leaf in paths], tree, 0)

    @property
    def _cannot(self) -> str:
        return f"micro-batches of {self._given} samples cannot be made ones of {self._size}"


def _joined(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    if len(tensors) < 2:
        return parts[0]
    joined = torch.cat(tensors)
    # Pinned like what it is made of, or copies to a GPU would make the host wait.
    return joined.pin_memory() if all(tensor.is_pinned() for tensor in tensors) else joined


class LossWeights:
    """Which tokens of each sample count in the loss, in what this process has read.

    A loss that is a mean over a micro-batch's tokens, and then over micro-batches, does not depend on their size if all
    samples count the same tokens. Megatron's data sets say which in the mask "loss_mask" of a micro-batch, of the shape
    (samples, sequence length).
    """

    def __init__(self) -> None:
        self._sample: Tensor | None = None
        #: Whether all samples that this rank has looked at count the same tokens.
        self.even_here = True

    def watch(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yield what `source` has, and look at it when it is read."""
        for micro_batch in items_of(source):
            self._look(micro_batch)
            yield micro_batch

    def even(self, device: torch.device) -> bool:
        """Return whether all samples that any rank has looked at count the same tokens.

        All ranks of the job call it alike. False where no rank has looked at any. `device` is what the ranks exchange
        tensors on.
        """
        uneven, looked = highest_of_all([not self.even_here, self._sample is not None], device)
        return not uneven and bool(looked)

    def _look(self, micro_batch: Any) -> None:
        mask = micro_batch.get(_MASK) if isinstance(micro_batch, Mapping) else None
        if not isinstance(mask, Tensor) or not len(mask):
            self.even_here = False
            return
        if self._sample is None:
            self._sample = mask[0].to("cpu", copy=True)
        # What Megatron has read before, and reads again, may have been moved to a GPU.
        alike = self._sample.shape == mask.shape[1:] and bool((mask.cpu() == self._sample).all())
        self.even_here = self.even_here and alike
