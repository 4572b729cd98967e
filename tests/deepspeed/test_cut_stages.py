"""A stage's part of a cut model as DeepSpeed calls it: tuples as messages, inputs passed on, one backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenpipe.partition.models import Example
from evenpipe.partition.trace import trace
from evenpipe.stage_code import load_parts, part_types
from tests.partition.code.cut import plan_at, profiled, written

pytest.importorskip("deepspeed")

from evenpipe.deepspeed.planned.stage import CutStage, jointly


class Layered(nn.Module):
    """Two tensors are taken; the second is used again at the end, and a mean that no gradient passes is sent on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        x, scale = inputs
        hidden = self.first(x)
        mean = hidden.detach().mean()
        hidden = hidden.tanh() + hidden
        return ((self.second(hidden) * scale - mean) * (scale > 0) - labels).square().mean()


def _micro_batch() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"inputs": (torch.randn(3, 4), torch.randn(3, 1)), "labels": torch.randn(3, 4)}


@pytest.fixture(params=range(2))
def stages(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[nn.Module, list[CutStage]]:
    """The model, and both stages of it, cut at one place or another."""
    torch.manual_seed(1)
    model, given = Layered(), _micro_batch()
    example = Example("layered", model, given)
    graph = trace(model, given)
    allowed = [number for number, cut in enumerate(graph.cut_allowed) if cut]
    cut = allowed[request.param * (len(allowed) - 1) // 2]
    found, path = profiled(example, graph), tmp_path / "P.json"
    written(example, graph, plan_at(found, 2, [cut]), found, path)
    types = [part for stage in range(2) for part in part_types(path, stage)]
    return model, [CutStage(path, types, stage, load_parts(path, stage, model)[0], 0) for stage in range(2)]


def test_gradients_of_all_that_is_sent_come_back_in_one_backward(stages: Any) -> None:
    model, (first, last) = stages
    given = _micro_batch()
    model(**given).backward()
    wanted = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()

    sent = first(given["inputs"])
    assert all(one.requires_grad == one.is_floating_point() for one in sent)  # as DeepSpeed takes it
    received = tuple(one.detach().clone().requires_grad_(one.is_floating_point()) for one in sent)
    last.labels = given["labels"]
    last(received).backward()
    assert all((one.grad is not None) == one.is_floating_point() for one in received)
    outputs = [one for one in sent if one.is_floating_point()]
    jointly(outputs, [one.grad for one in received if one.grad is not None]).backward()
    for name, one in model.named_parameters():
        assert torch.equal(one.grad, wanted[name]), name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.randn(2, 4), "inputs_0 is (2, 4), torch.float32, and the plan is for (3, 4), torch.float32: give"),
        (torch.ones(3, 4, dtype=torch.int32), "inputs_0 is (3, 4), torch.int32, and the plan is for (3, 4), torch.fl"),
    ],
)
def test_a_micro_batch_of_another_shape_or_type_ends_the_job_with_one_line(
    stages: Any, capsys: Any, given: torch.Tensor, said: str
) -> None:
    _, (first, _) = stages
    with pytest.raises(SystemExit):
        first((given, torch.randn(len(given), 1)))
    assert f"P.json: {said}" in capsys.readouterr().err


def test_evaluation_of_a_model_with_dropout_is_refused(stages: Any, capsys: Any, monkeypatch: Any) -> None:
    _, (first, last) = stages
    first.check_evaluation(False)
    monkeypatch.setattr(last.types[1], "RANDOM", (0,))
    with pytest.raises(SystemExit):
        last.check_evaluation(False)
    assert "eval_batch: the code of the stages is that of training" in capsys.readouterr().err
