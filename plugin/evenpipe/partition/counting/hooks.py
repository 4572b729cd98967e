"""What autograd saves for a backward, as it saves it (DawnPiper C.1)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from evenpipe.runtime.saved import plain_parts

__all__ = ["on_saved"]


def on_saved(note: Callable[[Tensor], None]) -> AbstractContextManager[object]:
    """Calls `note` with each tensor that is saved in the context, views and repetitions too; changes nothing.

    Of one that is taken apart, `note` is told what it consists of.
    """

    def pack(tensor: Tensor) -> Tensor:
        for part in plain_parts(tensor):
            note(part)
        return tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor)
