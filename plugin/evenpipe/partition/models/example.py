"""A model with inputs that it can be traced with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

__all__ = ["Example"]


class Example(NamedTuple):
    """A model in training mode, and the keyword arguments of one micro-batch, with which its forward gives a loss."""

    name: str
    model: nn.Module
    inputs: Mapping[str, Any]
