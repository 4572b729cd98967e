"""Real DeepSpeed engines with EvenPipe's schedules train as stock ones do, bit for bit, and hold less."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed.job import run_cases
from tests.schedules import build

pytest.importorskip("deepspeed")

_BF16 = {"bf16": {"enabled": True}, "gradient_clipping": 1.0}
_WHOLE = {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}
_ZERO = {"zero_optimization": {"stage": 1}}

# Stages, what DeepSpeed is told, the model; and the sections that are compared with a run without one.
_RUNS: list[tuple[int, dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = [
    (
        4,
        {},
        {},
        [
            {"schedule": "1f1b"},
            {"schedule": "gpipe"},
            {"schedule": "kfkb", "group_size": 2},
            {"schedule": "kfkb", "group_size": 2, "bpipe": True},
            {"bpipe": True},
            {"bpipe": True, "pair_adjacent": True, "partition": [0, 1, 3, 6, 8], "trace": "T.json"},
        ],
    ),
    (4, {**_BF16, **_ZERO, "steps_per_print": 3}, {"tied": True}, [{"bpipe": True}]),
    (4, {}, {"checkpoint_interval": 1}, [{"schedule": "1f1b"}, {"bpipe": True}]),
    (4, {}, {"checkpoints_itself": True}, [{"bpipe": True}]),
    (4, {}, {"pair": True, "evaluate": True}, [{"bpipe": True}]),
    (4, {}, {"dynamic": True}, [{"schedule": "1f1b"}, {"schedule": "kfkb", "group_size": 2}]),
    (2, _ZERO, {}, [{"schedule": "1f1b", "partition": [0, 3, 8]}]),
    (2, _BF16, {"tied": True}, [{"schedule": "kfkb", "group_size": 3}]),
    (2, _WHOLE, {"model_parallel": True, "tied": True}, [{"schedule": "kfkb", "group_size": 2}]),
    (2, {"gradient_accumulation_steps": 1}, {}, [{"schedule": "1f1b"}]),
]


def _cases() -> Iterator[dict[str, Any]]:
    for stages, config, model, sections in _RUNS:
        yield {"stages": stages, "config": config, **model}
        for section in sections:
            yield {"stages": stages, "config": {**config, "evenpipe": section}, "measure": True, **model}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the job runs."""
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def results(folder: Path) -> Iterator[Any]:
    """All runs, in one job of four processes: two replicas where there are two stages."""
    found, said = run_cases("train_tiny.py", list(_cases()), folder)
    assert re.findall(r"evenpipe: iteration (\d+) \| peak live: (.*?) \|", said) == [("3", "3 3 2 3")]
    assert said.count("bpipe: activation checkpointing goes through torch.utils.checkpoint") == 1
    return iter(found)


def _weights(ranks: list[dict[str, Any]]) -> set[tuple[int, str, str]]:
    return {(rank["replica"], *weight) for rank in ranks for weight in rank["weights"].items()}


def test_losses_and_weights_are_those_of_the_stock_engine(results: Any) -> None:
    for stages, config, model, sections in _RUNS:
        stock = next(results)
        assert {rank["engine"] for rank in stock} == {"PipelineEngine"}
        for section in sections:
            ours, told = next(results), (stages, config, model, section)
            assert {rank["engine"] for rank in ours} == {"EvenPipeEngine"}, told
            assert ours[0]["parts"] == section.get("partition", stock[0]["parts"]), told
            assert [rank["losses"] for rank in ours] == [rank["losses"] for rank in stock], told
            assert _weights(ours) == _weights(stock), told
            assert [rank["checkpointed"] for rank in ours] == [rank["checkpointed"] for rank in stock], told
            assert all(rank["left"] == 0 for rank in ours), told
            _assert_held(ours, stages, config.get("gradient_accumulation_steps", 8), section)


def test_a_timeline_has_what_each_rank_did_in_the_second_iteration(results: Any, folder: Path) -> None:
    document = json.loads((folder / "T.json").read_text())
    assert document["otherData"] == {"title": "iteration 2"}
    events = document["traceEvents"]
    rows = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    # A pair's two stages are next to each other.
    assert rows == [f"stage {stage}, data 0 (rank {rank})" for stage, rank in enumerate((0, 2, 3, 1))]
    for stage, actions in enumerate(build("1f1b", 4, 8, bpipe=True).actions):
        slices = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == stage]
        assert sorted(slices) == sorted(map(str, actions))


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
