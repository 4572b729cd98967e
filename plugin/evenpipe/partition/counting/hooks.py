"""What autograd saves for a backward, as it saves it (DawnPiper C.1)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["on_saved"]


def on_saved(note: Callable[[Tensor], None]) -> AbstractContextManager[object]:
    """Calls `note` with each tensor that is saved in the context, views and repetitions too; changes nothing."""

    def pack(tensor: Tensor) -> Tensor:
        note(tensor)
        return tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor)
