"""The types that a model's weights and activations have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from evenpipe.partition.models.errors import ModelError
from evenpipe.runtime.precisions import PRECISIONS

__all__ = ["made_in"]


@contextlib.contextmanager
def made_in(precision: str) -> Iterator[None]:
    """Models and tensors made inside have this precision: afterwards a weightless model could not be changed to it.

    Raises ModelError for a precision that is none of PRECISIONS.
    """
    if precision not in PRECISIONS:
        raise ModelError(f"no precision {precision!r}: there are {', '.join(PRECISIONS)}")
    before = torch.get_default_dtype()
    torch.set_default_dtype(PRECISIONS[precision])
    try:
        yield
    finally:
        torch.set_default_dtype(before)
