"""2BW through real DeepSpeed engines: losses and weights are those of plain PyTorch, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

_ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}}}
_SGD = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"},
    },
}
_BF16 = {"bf16": {"enabled": True}, "gradient_clipping": 0.5}
_ZERO = {"zero_optimization": {"stage": 1}}
_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
_FEW = {"gradient_accumulation_steps": 4}


def _case(stages: int, config: dict[str, Any], bpipe: bool = False, **more: Any) -> dict[str, Any]:
    section = {"schedule": "2bw", "bpipe": bpipe}
    section |= {key: more.pop(key) for key in ("trace", "trace_iteration") if key in more}
    return {"stages": stages, "config": {**_ADAM, **config, "evenpipe": section}, "steps": 4, **more}


_RUNS: list[dict[str, Any]] = [
    {"case": _case(4, _FEW), "evaluate": True},
    {"case": _case(4, {}, bpipe=True, measure=True), "changes": 4},
    {"case": _case(2, _SGD, trace="T.json", trace_iteration=3)},
    {"case": _case(4, {}, tied=True), "folder": "fp32"},
    # In bf16, DeepSpeed itself loads checkpoints with ZeRO-1 only.
    {"case": _case(4, {**_BF16, **_FEW, **_ZERO, **_IN_FP32}, tied=True), "folder": "bf16"},
    {"case": _case(2, _BF16)},
    {"case": _case(2, {**_FEW, **_ZERO}), "evaluate": True},
    {"case": _case(2, {**_BF16, **_ZERO, "gradient_clipping": 0.0}), "folder": "zero"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the job runs."""
    return tmp_path_factory.mktemp("two_buffered")


@pytest.fixture(scope="module")
def results(folder: Path) -> Iterator[Any]:
    """All runs, in one job of four processes: two replicas where there are two stages."""
    cases, out = folder / "cases.json", folder / "out.json"
    given = [{**one, "folder": str(folder / one["folder"])} if "folder" in one else one for one in _RUNS]
    cases.write_text(json.dumps(given))
    script = Path(__file__).with_name("train_two_buffered.py")
    job = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script), str(cases), str(out)]
    done = subprocess.run(
        [sys.executable, *job],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return iter(json.loads(out.read_text()))


def test_losses_and_weights_are_those_of_plain_pytorch(results: Any) -> None:
    for given in _RUNS:
        ranks = next(results)
        wanted = ranks[0]["delayed"]
        assert {rank["engine"] for rank in ranks} == {"TwoBufferedEngine"}, given
        for rank in ranks:
            assert rank["losses"] == wanted["losses"], given
            assert rank["evaluated"] == wanted["evaluated"], given
            assert rank["steps"] == len(wanted["losses"]), given
            assert rank["versions"] == 2, given
            if "folder" in given:  # the batches after the checkpoint, by an engine that has loaded it
                assert rank["resumed"] == wanted["losses"][-len(rank["resumed"]) :], given
        for trained in range(len(ranks[0]["weights"])):
            found = {weight for rank in ranks for weight in rank["weights"][trained].items()}
            missing = {tuple(weight) for weight in wanted["weights"]} - found
            # What is not tied of a tied layer, DeepSpeed saves on the first stage that has it only.
            assert {name for name, _ in missing} <= {"tied_modules.embedding.position"}, given
        if "left" in ranks[0]:
            assert max(rank["peak_units"] for rank in ranks) == 3  # (p + 2) / 2
            assert all(rank["left"] == 0 for rank in ranks)


def test_a_timeline_of_a_batch_has_the_first_forwards_of_the_next(results: Any, folder: Path) -> None:
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
