"""2BW through real DeepSpeed engines: losses and weights are those of plain PyTorch, bit for bit."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.deepspeed.job import run_cases
from tests.selected import marked, selected

pytest.importorskip("deepspeed")
from evenpipe.deepspeed.two_bw.gradients import EngineGradients

_ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}}}
_SGD = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"},
    },
}
_SCHEDULED = {
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 8, "warmup_type": "linear"},
    }
}
_BF16 = {"bf16": {"enabled": True}, "gradient_clipping": 0.5}
_ZERO = {"zero_optimization": {"stage": 1}}
_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
_CLIPPED = {"gradient_clipping": 0.5}
_FP16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 20, "loss_scale_window": 1, "hysteresis": 1}
_WHOLE = {"pipe_partitioned": False, "grad_partitioned": False}
_FEW = {"gradient_accumulation_steps": 4}


def _case(stages: int, config: dict[str, Any], bpipe: bool = False, **more: Any) -> dict[str, Any]:
    section = {"schedule": "2bw", "bpipe": bpipe}
    section |= {key: more.pop(key) for key in ("trace", "trace_iteration", "delay_correction") if key in more}
    return {"stages": stages, "config": {**_ADAM, **config, "evenpipe": section}, "steps": 4, **more}


def _shards(config: dict[str, Any]) -> dict[str, Any]:
    """In fp16, so many steps that the scale grows until it is too much."""
    steps = 20 if "fp16" in config else 4
    return _case(2, {**config, **_FEW, "pipeline": _WHOLE}, sharded=True, blocks=2) | {"steps": steps}


_RUNS: dict[str, dict[str, Any]] = {
    "Adam, evaluations": {"case": _case(4, _FEW), "evaluate": True, "others": True},
    "BPipe": {"case": _case(4, {}, bpipe=True, measure=True), "changes": 4},
    "BPipe, lengths that differ": {"case": _case(4, _FEW, bpipe=True, dynamic=True, measure=True), "evaluate": True},
    "lengths that differ": {"case": _case(2, _FEW, dynamic=True)},
    "SGD, traced": {"case": _case(2, _SGD, trace="T.json", trace_iteration=3)},
    "clipped, tied": {"case": _case(4, {**_CLIPPED, "steps_per_print": 2}, tied=True), "folder": "fp32"},
    "predicted": {"case": _case(2, {**_CLIPPED, **_FEW}, delay_correction="weight-prediction"), "folder": "predicted"},
    "ZeRO, error feedback": {
        "case": _case(2, {**_FEW, **_ZERO}, delay_correction="error-feedback"),
        "folder": "feedback",
    },
    "clipped, recomputed": {"case": _case(4, {**_CLIPPED, **_FEW}, checkpoint_interval=1)},
    "bf16, ZeRO, recomputed": {"case": _case(2, {**_BF16, **_ZERO, **_FEW}, tied=True, checkpoint_interval=1)},
    # In bf16, DeepSpeed itself loads checkpoints with ZeRO-1 only.
    "bf16, ZeRO, sums in fp32": {
        "case": _case(4, {**_BF16, **_FEW, **_ZERO, **_IN_FP32}, tied=True),
        "folder": "bf16",
    },
    "bf16, an overflow": {"case": _case(2, _BF16), "broken": 1},
    # Each replica steps with a part of the tied weight.
    "bf16, tied": {"case": _case(2, {**_BF16, **_FEW}, tied=True, blocks=0)},
    "ZeRO, an overflow": {"case": _case(2, {**_FEW, **_ZERO}, tied=True), "evaluate": True, "broken": 2},
    "bf16, ZeRO, unclipped": {
        "case": _case(2, {**_BF16, **_ZERO, "gradient_clipping": 0.0}, tied=True),
        "folder": "zero",
    },
    # DeepSpeed itself would step with it.
    "bf16, ZeRO, an overflow": {
        "case": _case(2, {"bf16": {"enabled": True, "check_grad_overflow": False}, **_ZERO, **_FEW}),
        "broken": 1,
    },
    # The first losses are scaled by too much: the first two steps, and then some, are skipped.
    "fp16": {
        "case": _case(4, {**_SCHEDULED, **_FEW, **_CLIPPED, "fp16": _FP16}, tied=True) | {"steps": 3},
        "folder": "fp16",
    },
    "fp16, fused": {"case": _case(2, {**_FEW, "fp16": _FP16}) | {"steps": 7}, "fused": True},
    "fp16, ZeRO": {
        "case": _case(2, {**_FEW, **_ZERO, "fp16": _FP16}, tied=True) | {"steps": 3},
        "folder": "fp16_zero",
    },
    "fp16, ZeRO, one scale": {
        "case": _case(4, {**_FEW, **_ZERO, **_CLIPPED, "fp16": {"enabled": True, "loss_scale": 128}})
    },
    # Two ranks a stage have half of each linear layer and of the tied embedding.
    "shards": {"case": _shards(_CLIPPED), "folder": "shards"},
    "shards, bf16, ZeRO": {"case": _shards({**_BF16, **_ZERO, **_IN_FP32}), "folder": "bf16_shards"},
    "shards, ZeRO, an overflow": {"case": _shards({**_CLIPPED, **_ZERO}), "broken": 2},
    "shards, fp16": {"case": _shards({**_CLIPPED, "fp16": _FP16})},
    "shards, fp16, fused": {"case": _shards({"fp16": _FP16}), "fused": True},
    "shards, fp16, ZeRO": {"case": _shards({**_CLIPPED, **_ZERO, "fp16": _FP16}), "folder": "fp16_shards"},
}
# What differs little from a case that stays.
_LONG = {
    "lengths that differ",
    "clipped, recomputed",
    "bf16, ZeRO, recomputed",
    "bf16, an overflow",
    "bf16, tied",
    "ZeRO, an overflow",
    "bf16, ZeRO, an overflow",
    "bf16, ZeRO, unclipped",
    "fp16, ZeRO, one scale",
    "shards, fp16",
    "shards, fp16, fused",
}
_REFUSED: dict[str, dict[str, Any]] = {
    'use ZeRO 0 or 1 with any torch optimizer, no offloading, and in fp16 no other "grad_accum_dtype"': {
        "config": {"fp16": {"enabled": True}, **_ZERO, **_IN_FP32}
    },
    "gradient scaling under torch_autocast is not available with 2bw, which finishes a step when ": {
        "config": {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the job runs."""
    return tmp_path_factory.mktemp("two_bw")


# Ranks 0, 2, 3 and 1 run the stages 0 to 3, of which 1 and 3 share a weight.
_PLACED = {**_case(4, {**_BF16, **_ZERO}, bpipe=True), "late_tie": True}
_NORMS = {
    name: {
        **_PLACED,
        "config": {**_PLACED["config"], "evenpipe": {"schedule": name, "bpipe": True, "pair_adjacent": True}},
    }
    for name in ("1f1b", "2bw")
}


_INTERRUPTED = _case(2, {**_FEW, **_ZERO, **_CLIPPED, "fp16": _FP16}, tied=True) | {"steps": 10}
# Refusals come late: DeepSpeed's autocast stays on in the process.
_OTHERS: dict[str, dict[str, Any]] = {
    **{f"norm, {name}": {"case": case, "norm": True} for name, case in _NORMS.items()},
    "interrupted": {"case": _INTERRUPTED, "interrupted": "interrupted"},
    **{line: {"case": {"stages": 4, **one}, "refused": True} for line, one in _REFUSED.items()},
    "iterators": {"case": _case(4, _FEW), "iterators": True},
}


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of the runs that are looked at, by name; one job of four processes: two replicas where there are two stages."""
    names = selected(request, "name", others=_RUNS.keys() - _LONG | _OTHERS.keys())
    given = {name: one for name, one in {**_RUNS, **_OTHERS}.items() if name in names}
    found, said = run_cases("train_two_bw.py", [_placed(one, folder) for one in given.values()], folder)
    (folder / "said").write_text(said)
    return dict(zip(given, found, strict=True))


def _placed(one: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {**one, **{key: str(folder / one[key]) for key in ("folder", "interrupted") if key in one}}


@pytest.mark.parametrize("name", marked(_RUNS, _LONG))
def test_losses_and_weights_are_those_of_plain_pytorch(results: dict[str, Any], name: str) -> None:
    given, ranks = _RUNS[name], results[name]
    wanted = ranks[0]["delayed"]
    assert {rank["engine"] for rank in ranks} == {"TwoBWEngine"}
    for rank in ranks:
        assert rank["losses"] == wanted["losses"]
        assert rank["evaluated"] == wanted["evaluated"]
        assert rank["steps"] == len(wanted["losses"])
        assert rank["skipped"] == sum(wanted["skipped"][:-1])  # the last is counted with the next batch
        assert rank["scale"] == wanted["scales"][-1]
        assert rank["versions"] == 2
        if "folder" in given:  # the batches after the checkpoint, by an engine that has loaded it
            assert rank["resumed"] == wanted["losses"][-len(rank["resumed"]) :]
    for trained in range(len(ranks[0]["weights"])):
        found = {weight for rank in ranks for weight in rank["weights"][trained].items()}
        missing = {tuple(weight) for weight in wanted["weights"]} - found
        # What is not tied of a tied layer, DeepSpeed saves on the first stage that has it only.
        assert {name for name, _ in missing} <= {"tied_modules.embedding.position"}
        unwanted = found - {tuple(weight) for weight in wanted["weights"]}
        assert {name for name, _ in unwanted} <= {"tied_modules.embedding.position"}
    if "left" in ranks[0]:
        assert max(rank["peak_units"] for rank in ranks) == 3  # (p + 2) / 2
        assert all(rank["left"] == 0 for rank in ranks)


def test_evaluations_saves_and_resumes_change_nothing_in_fp16(results: dict[str, Any]) -> None:
    for rank in results["interrupted"]:
        assert rank["interrupted"] == rank["plain"]
        assert 2 <= rank["skipped"] < _INTERRUPTED["steps"] - 2


def test_an_overflow_that_a_rank_does_not_count_is_one_too() -> None:
    weight = torch.zeros(2)
    for shard, wanted in ((0, 3.0), (1, 0.0)):
        rank = SimpleNamespace(shard=shard)
        assert EngineGradients._norm_of(rank, weight, torch.tensor([3.0, 0.0])).item() == wanted
        assert not EngineGradients._norm_of(rank, weight, torch.tensor([3.0, float("inf")])).isfinite()
    weight.model_parallel = True
    assert EngineGradients._norm_of(SimpleNamespace(shard=1), weight, torch.tensor([3.0, 0.0])).item() == 3.0


def test_tied_weights_are_counted_once_wherever_stages_are_placed(results: dict[str, Any]) -> None:
    for one, other in zip(results["norm, 1f1b"], results["norm, 2bw"], strict=True):
        assert one["norm"] == pytest.approx(other["norm"], rel=1e-6)


def test_a_timeline_of_a_batch_has_the_first_forwards_of_the_next(results: dict[str, Any], folder: Path) -> None:
    document = json.loads((folder / "T.json").read_text())
    assert document["otherData"] == {"title": "iteration 3"}
    events = document["traceEvents"]
    rows = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert rows == [f"stage {stage}, data {data} (rank {2 * stage + data})" for data in range(2) for stage in range(2)]
    for row in range(4):
        done = [event["name"] for event in events if event["ph"] in "Xi" and event["pid"] == row]
        ahead = 1 - row % 2
        forwards = [f"F{number + ahead}" for number in range(16, 24)]
        assert sorted(done) == sorted(["U1", *forwards, *(f"B{number}" for number in range(16, 24))])


def test_the_log_says_which_batch_its_figures_are_of(results: dict[str, Any], folder: Path) -> None:
    """The figures of a batch come after the next one; the second engine goes on from a checkpoint."""
    said = [line for line in (folder / "said").read_text().splitlines() if line.startswith("evenpipe: ")]
    first = next(number for number, line in enumerate(said) if "loss of iteration" in line)
    memory, lines = said[first - 1], said[first:]
    assert memory == (
        "evenpipe: 2bw | second weight version MiB: 0.1 0.1 0.1 0.1 | held gradients MiB: 0.0 0.1 0.1 0.1 |"
    )
    kinds = [re.sub(r"\d+\.\d{3}", "X", line).removeprefix("evenpipe: ") for line in lines]
    figures = "iteration {} | peak live: 4 3 2 1 | peak saved MiB: "
    wanted = [
        "iteration 2 | loss of iteration 2 | grad norm X of iteration 1 |",
        figures.format(2),
        "iteration 4 | loss of iteration 4 | grad norm X of iteration 3 |",
        figures.format(4),
        "iteration 6 | loss of iteration 6 | grad norm X of iteration 5 |",
        "links: at most 4 communicators a rank of gloo; opened in 2 rounds",  # of the engine that goes on
        "2bw: both weight versions are as they were saved",
        "2bw | second weight version MiB: ",
        "iteration 6 | loss of iteration 6 | grad norm X of iteration 5 |",
        figures.format(6),
    ]
    assert len(kinds) >= len(wanted)
    for found, begins in zip(kinds, wanted, strict=False):
        assert found.startswith(begins)


def test_what_there_is_to_skip_is_skipped_and_the_scale_grows_again(results: dict[str, Any]) -> None:
    grown = False
    trained = {name: results[name] for name in _RUNS if name in results}
    for name, ranks in trained.items():
        given, found = _RUNS[name], ranks[0]["delayed"]["skipped"]
        if "fp16" in given["case"]["config"] and "one scale" not in name:
            # Gradients of layers that are cut are smaller: the scale grows before it is too much.
            assert any(found) if given["case"].get("sharded") else found[:2] == [True, True], given
            assert not all(found), given
            scales = ranks[0]["delayed"]["scales"]
            grown = grown or any(before < after for before, after in pairwise(scales[:-1]))
        elif "broken" in given:
            assert sum(found) == 1, given
        else:
            assert not any(found), given
    assert grown
    kinds = {ranks[0]["optimizer"] for ranks in trained.values()}
    assert kinds >= {"FP16_Optimizer", "FP16_UnfusedOptimizer", "DeepSpeedZeroOptimizer", "BF16_Optimizer", "AdamW"}


@pytest.mark.parametrize("name", marked(_RUNS, _LONG))
def test_all_stages_are_told_the_additional_losses(results: dict[str, Any], name: str) -> None:
    for rank in results[name]:
        loss = float.fromhex(rank["losses"][-1])
        wanted = {"twice": (2 * loss).hex(), "half": (loss / 2).hex()} if _RUNS[name].get("others") else None
        assert rank["others"] == wanted


def test_what_two_bw_cannot_do_is_said_in_one_line(results: dict[str, Any]) -> None:
    for line in _REFUSED:
        for rank in results[line]:
            assert str(rank["refused"]).startswith("evenpipe.schedule: "), line
            assert line in rank["refused"]


def test_another_data_iterator_and_one_that_ended_are_said_in_one_line(results: dict[str, Any]) -> None:
    said = [one.splitlines() for one in results["iterators"][0]["said"]]
    assert [len(one) for one in said] == [1, 1, 1]
    assert "this batch was given another data iterator when 3 micro-batches had been read ahead" in said[0][0]
    assert "the data iterator ended within this batch" in said[1][0]
    assert "the data iterator ended within this batch" in said[2][0]
    assert all("call drain() before a new one" in one for (one,) in said)
