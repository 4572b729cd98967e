"""`evenpipe train --partition`: what a plan cuts is trained and measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from evenpipe.descriptions import device
from evenpipe.partition.dawnpiper.copies import PIPEDREAM, Workload
from evenpipe.partition.models import build, from_function
from evenpipe.partition.profiling import profile
from evenpipe.partition.search.finding import find_plan
from evenpipe.partition.timing import Roofline
from evenpipe.partition.trace import trace
from evenpipe.stage_code import write_stages
from evenpipe.train.options import OptionsError, TrainOptions
from tests.end_to_end.running import command
from tests.train.planned.cases import Alike

MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(32, 64)
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])

    def forward(self, tokens, others, halved=False):
        hidden = self.layers(self.tokens(tokens)).relu()
        found = self.tokens(others)
        return (hidden - found).square().mean() * (0.5 if halved else 1.0)

def make(micro_batch_size=4):
    tokens = torch.arange(4 * 16).view(4, 16) % 32
    return Model(), {"tokens": tokens, "others": tokens, "halved": True}
"""


def planned(folder: Path, workload: Workload) -> Path:
    file, path = folder / "model.py", folder / "P.json"
    file.write_text(MODEL)
    where = f"{file}:make"
    example = from_function(where)
    graph = trace(example.model, example.inputs)
    nodes = profile(graph, Roofline(device("a100-40gb")), where)
    plan = find_plan(nodes, workload, 2, 1 << 34)
    plan.write(path)
    write_stages(graph, nodes, plan, path)
    return path


def trained(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    words = [*command(), "--partition", str(path), "--trust", "--iterations", "3", *flags]
    return subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planned(tmp_path_factory.mktemp("plan"), Workload("1f1b", 4))


def test_time_and_memory_are_said_as_planned_and_as_measured(plan: Path, tmp_path: Path) -> None:
    run = trained(plan, "--json", "--lr", "0.01", "--picture", str(tmp_path / "P.png"))

    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert document["losses"][-1] < document["losses"][0]
    for stage in document["stages"]:
        assert stage["measured_ms"] > 0
        assert stage["planned_ms"] > 0
        assert stage["measured_peak_bytes"] == pytest.approx(stage["planned_peak_bytes"], rel=0.03)
    assert (tmp_path / "P.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def saving(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Plans of a small GPT-2 for two stages: with all that they need, and with three quarters of that."""
    folder = tmp_path_factory.mktemp("saving")
    example = build("gpt2-large", 2, small=True)
    graph = trace(example.model, example.inputs)
    nodes = profile(graph, Alike(), "gpt2-large")
    nodes = nodes.model_copy(update={"origin": nodes.origin.model_copy(update={"small": True})})
    whole = find_plan(nodes, Workload("1f1b", 4), 2, 1 << 34)
    least = max(stage.peak_bytes for stage in whole.stages) * 3 // 4
    saved = find_plan(nodes, Workload("1f1b", 4), 2, least, "swap+recompute", 1e-3)
    assert any(stage.recompute for stage in saved.stages)
    assert any(stage.swap for stage in saved.stages)
    for plan, name in ((whole, "whole.json"), (saved, "saved.json")):
        plan.write(folder / name)
        write_stages(graph, nodes, plan, folder / name)
    return folder / "whole.json", folder / "saved.json"


@pytest.mark.long
def test_what_is_swapped_and_computed_again_is_freed_and_changes_no_bit(saving: tuple[Path, Path]) -> None:
    whole, saved = (json.loads(trained(path, "--json").stdout) for path in saving)

    assert saved["losses_hex"] == whole["losses_hex"]
    for document in (whole, saved):
        for stage in document["stages"]:
            assert stage["measured_peak_bytes"] == pytest.approx(stage["planned_peak_bytes"], rel=0.03)
    freed = [max(stage["measured_peak_bytes"] for stage in document["stages"]) for document in (whole, saved)]
    assert freed[1] < 0.8 * freed[0]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"stages": 4}, r"--stages 4: .*P.json is for 2: leave it out"),
        ({"schedule": "gpipe"}, r"--schedule gpipe: .*P.json is for 1f1b"),
        ({"layers": 4}, r"--layers 4: the model and its data are the plan's: leave --layers out"),
        ({"model": "bert-large"}, r"--model bert-large: the model and its data are the plan's: leave --model out"),
        ({"tensor_parallel": 2}, r"--tensor-parallel 2: a plan of a plain model has none: leave --tensor-parallel out"),
    ],
)
def test_options_that_the_plan_contradicts_are_refused(plan: Path, asked: dict[str, object], says: str) -> None:
    with pytest.raises(OptionsError, match=says) as caught:
        TrainOptions.of(partition=str(plan), trust=True, **asked)
    assert "\n" not in str(caught.value)


def test_a_plan_does_not_have_a_python_file_executed_without_a_yes(plan: Path) -> None:
    with pytest.raises(OptionsError, match=r"P.json: its model comes from .*model.py:make: add --trust to execute"):
        TrainOptions.of(partition=str(plan))


def test_what_cannot_be_trained_is_refused(plan: Path, tmp_path: Path) -> None:
    weighed = planned(tmp_path, Workload(PIPEDREAM, 4))
    with pytest.raises(OptionsError, match=r"schedule=pipedream, which the plan is for, is weighed and not trained"):
        TrainOptions.of(partition=str(weighed))
    with pytest.raises(OptionsError, match=r"--engine planned: trains what a plan cuts: give --partition"):
        TrainOptions.of(engine="planned")
    with pytest.raises(OptionsError, match=r"--partition absent.json: No such file"):
        TrainOptions.of(partition="absent.json")


@pytest.mark.long
def test_a_model_that_has_changed_since_is_refused(plan: Path) -> None:
    (plan.parent / "model.py").write_text(MODEL.replace("range(8)", "range(7)"))
    run = trained(plan)
    (plan.parent / "model.py").write_text(MODEL)
    assert run.returncode == 2
    assert "--partition" in run.stderr.splitlines()[-1]
    assert "give the model that it was made of" in run.stderr.splitlines()[-1]
