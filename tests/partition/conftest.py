"""Small versions of the models that are known by name, traced once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from evenpipe.partition.models import Example, build
from evenpipe.partition.trace import Graph, trace

Small = Callable[..., tuple[Example, Graph]]


@pytest.fixture(scope="session")
def small() -> Small:
    @cache
    def made(name: str, precision: str = "fp32", micro_batch_size: int = 2) -> tuple[Example, Graph]:
        torch.manual_seed(0)
        example = build(name, micro_batch_size, precision=precision, small=True)
        return example, trace(example.model, example.inputs)

    return made
