"""What an evicted micro-batch travels as: large storages as they are, small ones packed into few tensors."""

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor, UntypedStorage

from evenpipe.runtime.saved import SavedStorage, bytes_of

__all__ = ["PIECE_BYTES", "SMALL_BYTES", "grouped", "memory_for", "packed", "taken", "unpack"]

# What CUDA's caching allocator keeps apart as small (kSmallSize): what packing frees is for small storages again. A
# network card of 25 GB/s takes 40 µs for as much, several times what it costs to start an operation.
SMALL_BYTES: Final = 2**20
# A piece and what is packed into it, or out of it, are there together for a moment, beyond any bound: 0.02 % of 80 GiB.
PIECE_BYTES: Final = 2**24


def grouped(storages: Iterable[SavedStorage]) -> list[list[SavedStorage]]:
    """Those that travel as one tensor: each large storage by itself, small ones up to `PIECE_BYTES` together."""
    groups: list[list[SavedStorage]] = []
    piece: list[SavedStorage] = []
    for saved in storages:
        if saved.nbytes >= SMALL_BYTES:
            groups.append([saved])
            continue
        if not piece or _nbytes(piece) + saved.nbytes > PIECE_BYTES:
            piece = []
            groups.append(piece)
        piece.append(saved)
    return groups


def packed(group: Sequence[SavedStorage]) -> Tensor:
    """All bytes of a group, one storage after the other, copied in stream order; one storage alone is not copied."""
    views = [saved.view() for saved in group]
    return views[0] if len(views) == 1 else torch.cat(views)


def taken(group: Sequence[SavedStorage], vacated: list[UntypedStorage]) -> Tensor | None:
    """Memory of a group's size as `packed`, taken out of what was `vacated`; None where there is none."""
    nbytes, device = _nbytes(group), group[0].device
    for at, storage in enumerate(vacated):
        if storage.nbytes() == nbytes and storage.device == device:
            return bytes_of(vacated.pop(at))
    return None


def memory_for(group: Sequence[SavedStorage], vacated: list[UntypedStorage]) -> Tensor:
    """Room for a group as `packed`: what is `taken`, or else new; contents undefined."""
    room = taken(group, vacated)
    return torch.empty(_nbytes(group), dtype=torch.uint8, device=group[0].device) if room is None else room


def unpack(tensor: Tensor, group: Sequence[SavedStorage]) -> None:
    """Give each storage of a group its bytes again: memory of its own, copied in stream order, unless it is alone."""
    if len(group) == 1:
        group[0].own(tensor.untyped_storage())
        return
    for saved in group:
        saved.own(torch.empty(saved.nbytes, dtype=torch.uint8, device=saved.device).untyped_storage())
    torch._foreach_copy_([saved.view() for saved in group], tensor.split_with_sizes([saved.nbytes for saved in group]))


def _nbytes(group: Iterable[SavedStorage]) -> int:
    return sum(saved.nbytes for saved in group)
