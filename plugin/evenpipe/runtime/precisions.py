"""The types of a model's weights, of what it computes and of what travels between its stages, by the options' names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

import torch

__all__ = ["PRECISIONS", "autocast_dtype", "autocasting", "precision_name"]

PRECISIONS: Final = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})


def precision_name(dtype: torch.dtype | None) -> str | None:
    """Return the option's name of a type, torch's own of others; None of None."""
    names = {of: name for name, of in PRECISIONS.items()}
    return None if dtype is None else names.get(dtype, str(dtype))


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of the `torch.autocast` that is on for a type of device; None where none is."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@contextmanager
def autocasting(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Compute inside as `torch.autocast` of `dtype` does, each cast anew; None: as outside.

    Weights whose casts are remembered would belong to whichever micro-batch comes first.
    """
    if dtype is None:
        yield
        return
    with torch.autocast(device_type, dtype, cache_enabled=False):
        yield
