"""Real DeepSpeed engines with EvenPipe's schedules train as stock ones do, bit for bit, and hold less."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed.job import run_cases
from tests.schedules import build
from tests.selected import marked, selected

pytest.importorskip("deepspeed")

_BF16 = {"bf16": {"enabled": True}, "gradient_clipping": 1.0}
_WHOLE = {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}
_ZERO = {"zero_optimization": {"stage": 1}}
_FEW = {"gradient_accumulation_steps": 4}

# Stages, what DeepSpeed is told, the model; and the sections that are compared with a run without one.
_RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = {
    "fp32": (
        4,
        {},
        {},
        [
            {"schedule": "1f1b"},
            {"schedule": "gpipe"},
            {"schedule": "kfkb", "group_size": 2, "bpipe": True},
            {"schedule": "zb-h1"},
            {"swap": 0.8, "bpipe": True},
            {"bpipe": True, "pair_adjacent": True, "partition": [0, 1, 3, 6, 8], "trace": "T.json"},
        ],
    ),
    "bf16, ZeRO, tied": (
        4,
        {**_BF16, **_ZERO, "steps_per_print": 2},
        {"tied": True},
        [{"bpipe": True}, {"schedule": "zb-h1"}],
    ),
    "recomputed": (
        4,
        {},
        {"checkpoint_interval": 1},
        [{"swap": 0.5}, {"bpipe": True}, {"schedule": "zb-h1"}],
    ),
    "recomputed by the model": (4, {}, {"checkpoints_itself": True}, [{"bpipe": True}, {"schedule": "zb-h1"}]),
    "two tensors, evaluations": (
        4,
        {},
        {"pair": True, "evaluate": True},
        [{"schedule": "zb-h1"}],
    ),
    "dynamic shapes": (
        4,
        {},
        {"dynamic": True, "pair": True, "evaluate": True, "steps": 3},
        [{"swap": 0.5}, {"schedule": "kfkb", "group_size": 2, "bpipe": True}],
    ),
    "dynamic shapes, replicas": (2, {}, {"dynamic": True, "steps": 3}, [{"schedule": "1f1b"}]),
    "ZeRO, partition": (
        2,
        _ZERO,
        {},
        [{"schedule": "1f1b", "partition": [0, 3, 8]}, {"schedule": "zb-h1", "partition": [0, 3, 8]}],
    ),
    "bf16, tied": (2, _BF16, {"tied": True}, [{"schedule": "kfkb", "group_size": 3}, {"schedule": "zb-h1"}]),
    "bf16, summed at once": (
        2,
        {**_FEW, "bf16": {"enabled": True, "immediate_grad_update": True}},
        {},
        [{"schedule": "zb-h1"}],
    ),
    "fp16, ZeRO": (2, {**_FEW, "fp16": {"enabled": True}, **_ZERO}, {"late_tie": True}, [{"schedule": "zb-h1"}]),
    "fp16": (2, {**_FEW, "fp16": {"enabled": True, "initial_scale_power": 4}}, {}, [{"schedule": "zb-h1"}]),
    "fp16, ZeRO, sums in fp32": (
        2,
        {**_FEW, "fp16": {"enabled": True}, **_ZERO, "data_types": {"grad_accum_dtype": "fp32"}},
        {},
        [{"schedule": "zb-h1"}],
    ),
    "bf16, ZeRO, sums in bf16": (
        2,
        {**_FEW, **_BF16, **_ZERO, "data_types": {"grad_accum_dtype": "bf16"}},
        {},
        [{"schedule": "zb-h1"}],
    ),
    "autocast": (
        2,
        {**_FEW, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {},
        [{"schedule": "zb-h1"}],
    ),
    "model-parallel": (2, _WHOLE, {"model_parallel": True, "tied": True}, [{"schedule": "kfkb", "group_size": 2}]),
    "one micro-batch": (2, {"gradient_accumulation_steps": 1}, {}, [{"schedule": "1f1b"}]),
}
# What one stage is given.
_ONE_STAGE: list[dict[str, Any]] = [
    {},
    {"evenpipe": {"schedule": "kfkb", "group_size": 2, "bpipe": True, "pair_adjacent": True}},
]
# What differs little from a case that stays.
_LONG = {
    "dynamic shapes, replicas",
    "recomputed by the model",
    "model-parallel",
    "ZeRO, partition",
    "bf16, tied",
    "one micro-batch",
}


def _cases(name: str) -> list[dict[str, Any]]:
    """DeepSpeed's own engine, and ours by each section."""
    stages, config, model, sections = _RUNS[name]
    ours = [{**config, "evenpipe": section} for section in sections]
    return [
        {"stages": stages, "config": config, **model},
        *({"stages": stages, "config": one, "measure": True, **model} for one in ours),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the job runs."""
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """The runs that are looked at, in one job of four processes: two replicas where there are two stages."""
    names = selected(request, "name", others=_RUNS.keys() - _LONG)
    cases = {name: _cases(name) for name in _RUNS if name in names}
    cases["one stage"] = [{"stages": 1, "config": config} for config in _ONE_STAGE]
    found, said = run_cases("train_tiny.py", [case for those in cases.values() for case in those], folder)
    (folder / "said").write_text(said)
    left = iter(found)
    return {name: [next(left) for _ in those] for name, those in cases.items()}


def _weights(ranks: list[dict[str, Any]]) -> set[tuple[int, str, str]]:
    return {(rank["replica"], *weight) for rank in ranks for weight in rank["weights"].items()}


@pytest.mark.parametrize("name", marked(_RUNS, _LONG))
def test_losses_and_weights_are_those_of_the_stock_engine(results: dict[str, list[Any]], name: str) -> None:
    stages, config, _, sections = _RUNS[name]
    stock, *by_section = results[name]
    assert {rank["engine"] for rank in stock} == {"PipelineEngine"}
    for section, ours in zip(sections, by_section, strict=True):
        assert {rank["engine"] for rank in ours} == {"EvenPipeEngine"}, section
        assert ours[0]["parts"] == section.get("partition", stock[0]["parts"]), section
        assert [rank["losses"] for rank in ours] == [rank["losses"] for rank in stock], section
        assert _weights(ours) == _weights(stock), section
        assert [rank["checkpointed"] for rank in ours] == [rank["checkpointed"] for rank in stock], section
        assert all(rank["left"] == 0 for rank in ours), section
        _assert_held(ours, stages, config.get("gradient_accumulation_steps", 8), section)


def test_what_is_held_and_who_recomputes_is_said_once(results: dict[str, list[Any]], folder: Path) -> None:
    said = (folder / "said").read_text()
    assert re.findall(r"evenpipe: iteration (\d+) \| peak live: (.*?) \|", said) == [("2", "3 3 2 3"), ("2", "4 4 4 4")]
    assert said.count("evenpipe: activation checkpointing goes through torch.utils.checkpoint") == 1


def test_a_timeline_has_what_each_rank_did_in_the_second_iteration(results: dict[str, list[Any]], folder: Path) -> None:
    document = json.loads((folder / "T.json").read_text())
    assert document["otherData"] == {"title": "iteration 2"}
    events = document["traceEvents"]
    rows = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    # A pair's two stages are next to each other.
    assert rows == [f"stage {stage}, data 0 (rank {rank})" for stage, rank in enumerate((0, 2, 3, 1))]
    for stage, actions in enumerate(build("1f1b", 4, 8, bpipe=True).actions):
        slices = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == stage]
        assert sorted(slices) == sorted(map(str, actions))


def test_one_stage_is_deepspeeds_own(results: dict[str, list[Any]], folder: Path) -> None:
    stock, ours = results["one stage"]
    assert {rank["engine"] for rank in ours} == {"PipelineEngine"}
    assert [rank["losses"] for rank in ours] == [rank["losses"] for rank in stock]
    assert _weights(ours) == _weights(stock)
    said = re.findall("evenpipe: PipelineModule has one stage: (.*)\n", (folder / "said").read_text())
    unused = "schedule, bpipe, group_size, pair_adjacent"
    assert said == [f"DeepSpeed's own engine trains it, and nothing comes of the section's {unused}"]


def _assert_held(ranks: list[dict[str, Any]], stages: int, micro_batches: int, section: dict[str, Any]) -> None:
    """BPipe: every stage holds k ⌈(p + 2) / 2⌉ micro-batches at most; without it, the first holds k p."""
    group = section.get("group_size", 1)
    peak = max(rank["peak_units"] for rank in ranks)
    if section.get("bpipe"):
        assert peak == group * ((stages + 3) // 2)
        assert sum(rank["evicted_bytes"] for rank in ranks) > 0
    elif section.get("schedule") == "gpipe":
        assert peak == micro_batches
    else:
        assert peak == min(group * stages, micro_batches)
    if section.get("pair_adjacent"):
        assert [rank["stage"] for rank in ranks] == [0, 3, 1, 2]
