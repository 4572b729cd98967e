"""A PipelineModule that a plan cuts inside layers trains as the uncut one does, with real DeepSpeed engines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

from evenpipe.cli.parser import Parser
from evenpipe.cli.partition import add_to
from tests.deepspeed.job import run_cases
from tests.selected import marked, selected

pytest.importorskip("deepspeed")

_ROOT: Final = Path(__file__).parents[2]
_BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}

# Stages, what DeepSpeed is told, the model, whether the cut run is held against DeepSpeed's own engine with whole
# layers (else against the same cuts with everything kept), and the plans: for what, and what else the section says.
_RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any], list[tuple[dict[str, Any], dict[str, Any]]]]] = {
    "fp32": (
        4,
        {},
        {"evaluate": True},
        [
            ({}, {"schedule": "1f1b"}),
            ({"schedule": ["kfkb", 8, 1, 2, True]}, {}),
            ({"schedule": ["gpipe", 8]}, {"schedule": "gpipe"}),
            ({"schedule": ["zb-h1", 8], "optimize": "swap+recompute", "share": 0.8}, {}),
        ],
    ),
    "recomputed and swapped": (
        4,
        {"steps_per_print": 1},
        {},
        [
            ({"optimize": "recompute", "share": 0.8}, {}),
            ({"schedule": ["1f1b", 8, 1, 1, True], "optimize": "swap+recompute", "share": 0.8}, {}),
            ({"schedule": ["zb-h1", 8]}, {}),
        ],
    ),
    "tied, weights decay in groups": (
        4,
        {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}},
        {"tied": True, "decay": "function"},
        [({"schedule": ["1f1b", 8, 1, 1, True]}, {})],
    ),
    "bf16, ZeRO": (2, _BF16, {}, [({"dtype": "bfloat16"}, {})]),
    "integers beside": (4, {}, {"pair": True}, [({}, {})]),
    "2 stages, 2 replicas": (2, {}, {}, [({}, {})]),
}
_LONG = {"integers beside", "2 stages, 2 replicas"}

# Runs that train the same: the model, and of each the section, with the plan if it has one.
_ALIKE: dict[str, tuple[dict[str, Any], list[tuple[dict[str, Any], dict[str, Any] | None]]]] = {
    "2bw": (
        {"tied": True, "evaluate": True},
        [
            ({"schedule": "2bw"}, None),
            ({}, {"schedule": ["2bw", 8]}),
            ({}, {"schedule": ["2bw", 8, 1, 1, True], "optimize": "recompute", "share": 0.8}),
            ({}, {"schedule": ["2bw", 8], "optimize": "swap+recompute", "share": 0.8}),
        ],
    ),
    "dropout": (
        {"dropout": True},
        [({}, {}), ({}, {"schedule": ["1f1b", 8, 1, 1, True], "optimize": "swap+recompute", "share": 0.8})],
    ),
}

_SECTION = {"evenpipe": {"partition": "saved.json"}}
_SAVED = {"plan": "saved.json", "stages": 4}
# What is trained, saved and loaded, one after the other.
_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "in one go": {"config": _SECTION, "cut": _SAVED, "steps": 3},
    "saved": {"config": _SECTION, "cut": {**_SAVED, "save": "cut"}, "steps": 2},
    "resumed": {"config": _SECTION, "cut": {**_SAVED, "load": "cut"}, "steps": 1},
    "uncut": {"config": {}, "cut": {"load": "cut", "weights_only": True, "save": "uncut"}, "steps": 0},
    "cut again": {
        "config": {"evenpipe": {"partition": "otherwise.json"}},
        "cut": {"plan": "otherwise.json", "stages": 4, "schedule": ["gpipe", 8], "load": "uncut", "weights_only": True},
        "steps": 0,
    },
}
# What cannot be, with what is said.
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stages": (
        {"stages": 2},
        "saved.json: is for 4 stages, and PipelineModule has 2: give it as many, or make a plan with --stages 2",
    ),
    "one stage": (
        {"stages": 1},
        "saved.json: is carried out by two stages or more, and PipelineModule has 1: give it as many as the plan, or ",
    ),
    "one stage, 2bw": (
        {"stages": 1, "section": {"partition": None, "schedule": "2bw"}},
        '"2bw": trains by a rule of its own, for two stages or more, and PipelineModule has 1: give it more, or ',
    ),
    "schedule": (
        {"section": {"schedule": "gpipe"}},
        'saved.json: is for "schedule": "1f1b", not "schedule": "gpipe": make a plan for that, or leave schedule out',
    ),
    "micro-batches": (
        {"config": {"gradient_accumulation_steps": 6}},
        "saved.json: is for gradient_accumulation_steps 8, not 6: make a plan with --micro-batches 6",
    ),
    "samples": (
        {"config": {"train_micro_batch_size_per_gpu": 1}},
        "saved.json: is for train_micro_batch_size_per_gpu 2, not 1: make a plan with --micro-batch-size 1",
    ),
    "a larger model": (
        {"blocks": 7},
        "saved.json: the plan knows no '7.first.weight', which PipelineModule's layers have: make one of this model",
    ),
    "a smaller model": (
        {"blocks": 5},
        "saved.stage3.py: the model has no '6.down.bias', which the plan's had: give the model that it was made of",
    ),
    "no ties": (
        {"tied": False},
        "saved.json: the plan knows no '0.weight', which PipelineModule's layers have: make one of this model",
    ),
    "groups": (
        {"decay": "list"},
        "deals layers out anew, after model_parameters was made of them: for groups, give a function as optimizer, "
        "which is called when layers have been dealt out (lambda parameters: AdamW(groups_of(model)));",
    ),
    "an optimizer": (
        {"decay": "optimizer"},
        "deals layers out anew, after the optimizer was made of them: give a function as optimizer, "
        "which is called when layers have been dealt out (lambda parameters: AdamW(groups_of(model)));",
    ),
    "no plan": ({"section": {"partition": "none.json"}}, "none.json: No such file or directory"),
}
# What is told where a case that stays is.
_REFUSED_LONG = {"one stage", "samples", "a larger model", "an optimizer", "no plan"}


def _cases(name: str) -> list[dict[str, Any]]:
    """DeepSpeed's own engine with whole layers, and ours by each plan."""
    stages, config, model, plans = _RUNS[name]
    whole_layers = {**model, "decay": "list"} if "decay" in model else model
    cases: list[dict[str, Any]] = [{"stages": stages, "config": config, **whole_layers}]
    for number, (plan, section) in enumerate(plans):
        path = f"{name} {number}.json"
        whole = {**config, "evenpipe": {**section, "partition": path}}
        cut = {"plan": path, "stages": stages, **plan}
        cases.append({"stages": stages, "config": whole, "cut": cut, "measure": True, **model})
    return cases


def _alike(name: str) -> list[dict[str, Any]]:
    model, runs = _ALIKE[name]
    cases: list[dict[str, Any]] = []
    for number, (section, plan) in enumerate(runs):
        path = f"{name} {number}.json"
        ours = section if plan is None else {**section, "partition": path}
        cut = {} if plan is None else {"plan": path, "stages": 4, **plan}
        cases.append({"stages": 4, "config": {"evenpipe": ours}, "cut": cut, **model})
    return cases


def _refused(name: str) -> dict[str, Any]:
    given = dict(_REFUSED[name][0])
    section = {"partition": "saved.json", **given.pop("section", {})}
    config = {**given.pop("config", {}), "evenpipe": section}
    return {"stages": 4, "tied": True, "config": config, "cut": _SAVED, **given}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the job runs."""
    return tmp_path_factory.mktemp("planned")


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """The runs that are looked at, in one job of four processes: two replicas where there are two stages."""
    names = selected(request, "name", others=_RUNS.keys() - _LONG)
    cases = {name: _cases(name) for name in _RUNS if name in names}
    cases |= {name: _alike(name) for name in _ALIKE if name in names}
    cases["checkpoints"] = [{"stages": 4, "tied": True, **one} for one in _CHECKPOINTS.values()]
    cases |= {name: [_refused(name)] for name in _REFUSED if name in names}
    found, said = run_cases("train_planned.py", [case for those in cases.values() for case in those], folder)
    (folder / "said").write_text(said)
    left = iter(found)
    return {name: [next(left) for _ in those] for name, those in cases.items()}


def _weights(ranks: list[dict[str, Any]]) -> dict[str, str]:
    """Of tied layers the first stage's: what is not tied of them is trained there, in DeepSpeed too."""
    return {name: weight for rank in reversed(ranks) for name, weight in rank["weights"].items()}


@pytest.mark.parametrize("name", marked(_RUNS, _LONG))
def test_losses_and_weights_are_those_of_whole_layers_in_the_stock_engine(
    results: dict[str, list[Any]], name: str
) -> None:
    stock, *cut = results[name]
    assert {rank["engine"] for rank in stock} == {"PipelineEngine"}
    for plan, ranks in zip(_RUNS[name][3], cut, strict=True):
        assert {(rank["engine"], rank["layers"]) for rank in ranks} == {("EvenPipeEngine", 1)}, plan
        assert [rank["losses"] for rank in ranks] == [rank["losses"] for rank in stock], plan
        assert _weights(ranks) == _weights(stock), plan


@pytest.mark.long
@pytest.mark.parametrize("name", _ALIKE)
def test_plans_train_alike_without_flushes_and_with_dropout(results: dict[str, list[Any]], name: str) -> None:
    first, *others = results[name]
    assert len({tuple(rank["losses"]) for rank in first}) == 1
    for ranks in others:
        assert [rank["losses"] for rank in ranks] == [rank["losses"] for rank in first]
        assert _weights(ranks) == _weights(first)


def test_what_is_recomputed_and_swapped_is_not_held(results: dict[str, list[Any]]) -> None:
    (_, kept, *_), (_, recomputed, swapped, _) = results["fp32"], results["recomputed and swapped"]
    most = max(rank["peak_bytes"] for rank in kept)
    assert max(rank["peak_bytes"] for rank in recomputed) < 0.9 * most
    assert max(rank["peak_bytes"] for rank in swapped) < 0.9 * most


def test_each_stage_is_said_to_take_what_was_planned(results: dict[str, list[Any]], folder: Path) -> None:
    """Once for every plan of these runs; on a CPU bytes are those of real tensors, weights and Adam's among them."""
    said = (folder / "said").read_text()
    told = re.findall(r"evenpipe: stage (\d) \(nodes .*\| peak MiB: ([\d.]+) predicted, ([\d.]+) measured \|", said)
    assert [int(stage) for stage, *_ in told] == [*range(4)] * 3
    for _, predicted, measured in told:
        assert float(measured) == pytest.approx(float(predicted), rel=0.03, abs=0.11)


def test_one_line_says_what_is_cut(results: dict[str, list[Any]], folder: Path) -> None:
    said = (folder / "said").read_text()
    assert said.count("evenpipe: partition: fp32 0.json cuts PipelineModule's 8 layers inside layers 2, 5: ") == 1


def test_a_resumed_run_goes_on_as_the_one_that_saved(results: dict[str, list[Any]]) -> None:
    whole, saved, resumed, *_ = results["checkpoints"]
    assert [rank["losses"] for rank in saved] == [rank["losses"][:2] for rank in whole]
    assert [rank["losses"] for rank in resumed] == [rank["losses"][2:] for rank in whole]
    assert _weights(resumed) == _weights(whole)


def test_weights_are_saved_and_loaded_by_layers_cut_or_not(results: dict[str, list[Any]]) -> None:
    _, saved, _, uncut, cut_again = results["checkpoints"]
    assert {rank["engine"] for rank in uncut} == {"PipelineEngine"}
    assert _weights(saved) == _weights(uncut) == _weights(cut_again)


@pytest.mark.parametrize("name", marked(_REFUSED, _REFUSED_LONG))
def test_what_a_plan_is_not_for_ends_the_job_with_one_line(
    results: dict[str, list[Any]], folder: Path, name: str
) -> None:
    [ranks] = results[name]
    assert ranks == [{"status": 2}] * 4
    line = rf"evenpipe: error: evenpipe\.(partition|schedule): {re.escape(_REFUSED[name][1])}"
    assert re.search(line, (folder / "said").read_text())


def test_the_pages_command_makes_the_plan_that_the_examples_configuration_trains_with() -> None:
    page = (_ROOT / "docs/deepspeed.md").read_text()
    [command] = re.findall(r"^evenpipe (partition --module gpt\.py:uncut .*)$", page, re.MULTILINE)
    parser = Parser()
    add_to(parser.add_subparsers())
    asked = parser.parse_args(command.split())
    config = json.loads((_ROOT / "examples/deepspeed/planned.json").read_text())
    given = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    assert (asked.micro_batch_size, asked.micro_batches) == given
    assert str(asked.out) == config["evenpipe"]["partition"]
    for text in page, (_ROOT / "examples/deepspeed/gpt.py").read_text():
        [default] = re.findall(r"def uncut\(micro_batch_size(?:: int)? ?= ?(\d+)\)", text)
        assert int(default) == asked.micro_batch_size
