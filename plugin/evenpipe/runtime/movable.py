"""Decides by reference counts which saved storages may leave this stage.

Freeing a storage that somebody else still holds would not free its memory, and would bring back another copy of it:
a module's buffer, the data set, a ctx attribute, another micro-batch. Nobody keeps a list of holders, and torch has no
public way to ask. Counts tell: a storage may leave if its only holders are the handles and attached tensors that the
store empties itself. A storage has two counts, of the tensors and wrappers that hold it in C++, and of the references
to its one wrapper in Python; both have to be those of the store alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from evenpipe.runtime.saved import PLAIN, Geometry, SavedStorage

__all__ = ["largest_within", "least_that_frees", "may_depart"]


def may_depart(saved: SavedStorage, aliases: Sequence[Tensor | Geometry]) -> bool:
    """Return whether nobody but `saved` and `aliases` holds the storage, and whether these can be rebuilt.

    Raises RuntimeError if this torch cannot tell who holds a storage.
    """
    storage = saved.storage
    if storage is None or not saved.movable or saved.aside or saved.nbytes == 0:
        return False
    if _use_count(storage) != 1 + len(aliases):
        return False
    del storage
    if sys.getrefcount(saved.storage) != _references_of_one_holder():
        return False
    return all(isinstance(alias, Tensor) and _can_be_rebuilt(alias) for alias in aliases)


def largest_within(sealed: Sequence[SavedStorage], limit: float) -> set[SavedStorage]:
    """Return which of the `sealed` storages, in the order that they were saved, to swap: at most `limit` bytes.

    The larger first, which frees more for each copy that is started; of equal ones that saved first, whose backward
    comes last (DawnPiper §4.3, after Capuchin: by the bytes freed in the time that the link takes, and the distance
    between two uses).
    """
    chosen = set[SavedStorage]()
    for saved in _larger_first(sealed):
        if saved.nbytes <= limit:
            chosen.add(saved)
            limit -= saved.nbytes
    return chosen


def least_that_frees(sealed: Sequence[SavedStorage], nbytes: float) -> set[SavedStorage]:
    """Return which of the `sealed` storages to swap so that at least so many bytes leave: all, where they are fewer.

    Those of `largest_within`, and the smallest other one that is as large as what is missing.
    """
    chosen = largest_within(sealed, nbytes)
    missing = nbytes - sum(saved.nbytes for saved in chosen)
    if missing > 0:
        others = [saved for saved in _larger_first(sealed) if saved not in chosen]
        chosen.update(others[-1:])  # each was larger than what was missing when it was left out
    return chosen


def _larger_first(sealed: Sequence[SavedStorage]) -> list[SavedStorage]:
    return sorted(sealed, key=lambda saved: -saved.nbytes)


def _can_be_rebuilt(tensor: Tensor) -> bool:
    """Return whether storage and geometry are all there is to this tensor."""
    plain = type(tensor) in PLAIN and tensor.layout is torch.strided
    return plain and not (
        tensor.is_meta or tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    )


@cache
def _references_of_one_holder() -> int:
    """Return what `sys.getrefcount` says of a storage that one object holds in Python.

    Asked of torch, because that itself refers to a storage's Python wrapper in some releases and not in others.
    """
    tensor = torch.empty(0)
    holder = SimpleNamespace(storage=tensor.untyped_storage())
    return sys.getrefcount(holder.storage)


def _use_count(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors and wrappers that hold `storage`; its Python wrapper counts as one."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        raise RuntimeError(
            f"torch {torch.__version__} cannot tell who else holds saved memory (no torch._C._storage_Use_Count), "
            "so nothing can be evicted: use torch 2.10 or newer, or run without BPipe"
        )
    return count(storage._cdata)
