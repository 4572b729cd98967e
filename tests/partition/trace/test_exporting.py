"""Models that cannot be traced: the message names the operation and the user's line."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

from evenpipe.partition.trace import TraceError, trace


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.sum() > 0:
            return y.mean()
        return y.sum()


class Counting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y[y > 0].sum()


class Reading(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.sum() * y.max().item()


class Lossless(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("model", "line"),
    [(Branching, "if y.sum() > 0"), (Counting, "y[y > 0]"), (Reading, "y.max().item()")],
)
def test_the_users_line_is_named_and_nothing_is_printed(model, line, capfd):
    with pytest.raises(TraceError) as caught:
        trace(model(8, 8), {"x": torch.zeros(2, 8)})

    source, start = inspect.getsourcelines(model)
    number = start + next(offset for offset, text in enumerate(source) if line in text)
    message = str(caught.value)
    assert line in message
    assert f"{__file__}:{number}" in message
    assert "\n" not in message
    assert capfd.readouterr().err == ""


def test_a_model_without_a_loss_is_told_what_to_return():
    with pytest.raises(TraceError, match="Lossless returns no loss"):
        trace(Lossless(8, 8), {"input": torch.zeros(2, 8)})


def test_an_argument_that_forward_lacks_is_named():
    with pytest.raises(TraceError, match="no argument 'y'"):
        trace(Branching(8, 8), {"y": torch.zeros(2, 8)})
