"""Written stages held against their model: what differs is refused, also from the second micro-batch on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from evenpipe.partition.models import Example
from evenpipe.partition.trace import trace
from evenpipe.stage_code import StageCodeError, compare_stages
from tests.partition.code.cut import plan_at, profiled, written


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x)) * self.scale()).square().mean()

    def scale(self) -> Tensor | float:
        raise NotImplementedError


class Alternating(Model):
    """Tracing runs the forward three times; the first and the third have the same scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: Iterator[float] = itertools.cycle([1.0, 2.0])

    def scale(self) -> float:
        return next(self.scales)


class CountedInPlace(Model):
    def scale(self) -> Tensor:
        return self.count.add_(1).clone()


class CountedAnew(Model):
    def scale(self) -> Tensor:
        self.count = self.count + 1
        return self.count


class Dropped(Model):
    def scale(self) -> Tensor:
        return nn.functional.dropout(torch.ones(8))


def _compared(kind: type[Model], path: Path) -> None:
    example = Example(kind.__name__, kind(), {"x": torch.ones(4, 8)})
    graph = trace(example.model, example.inputs)
    found = profiled(example, graph)
    written(example, graph, plan_at(found, 2, [0]), found, path)
    compare_stages(path, kind(), example.inputs)


def test_what_changes_from_the_second_micro_batch_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageCodeError, match="the loss by the plan's stages differs from the model's own"):
        _compared(Alternating, tmp_path / "P.json")


@pytest.mark.parametrize("kind", [CountedInPlace, CountedAnew, Dropped])
def test_buffers_and_random_numbers_of_two_micro_batches_are_the_models(kind: type[Model], tmp_path: Path) -> None:
    _compared(kind, tmp_path / "P.json")
