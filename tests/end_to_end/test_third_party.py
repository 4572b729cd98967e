"""A schedule of another package, which is one file, trains in every engine as 1F1B does, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed.job import run_cases

MODULE = '''
"""1F1B that runs one forward more ahead of its backwards, where that takes no more memory than stage 0 has."""

from evenpipe.schedule import Action, Size, Spec


def _row(size: Size, stage: int) -> list[Action]:
    m = size.micro_batches
    ahead = min(size.stages - stage + (stage > 0), m)
    row = [Action("F", i) for i in range(ahead)]
    for i in range(m):
        row.append(Action("B", i))
        if i + ahead < m:
            row.append(Action("F", i + ahead))
    return row


SPEC = Spec(
    name="eager",
    summary="1f1b that runs one forward more ahead",
    order=lambda size: [_row(size, stage) for stage in range(size.stages)],
    bound=lambda size: min(size.stages, size.micro_batches),
)
'''
ENTRY_POINTS = "[evenpipe.schedules]\neager = other_schedules:SPEC\n"

# One process starts those of both engines, so that each engine starts once.
TRAIN = """
import json
from evenpipe.cli.main import main
from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions

size = {"layers": 4, "hidden": 32, "seq_length": 32, "stages": 4, "micro_batches": 7, "iterations": 2}
cases = [
    TrainOptions.of(engine=engine, schedule=schedule, **size)
    for engine in ("module", "evenpipe")
    for schedule in ("1f1b", "eager")
]
main(["schedule", "--schedule", "eager", "--stages", "2", "--micro-batches", "3"])
found = [
    {"losses": [loss.hex() for loss in result.losses], "weights": result.weights_sha256,
     "actions": [[str(span.action) for span in spans] for spans in result.spans],
     "peaks": [stage.peak_live for stage in result.stages]}
    for result in run_cases(cases)
]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where the other package is installed."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "other_schedules.py").write_text(MODULE)
    (folder / "other_schedules-1.0.dist-info").mkdir()
    (folder / "other_schedules-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    already = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *([already] if already else [])])}


def test_it_is_one_file_of_60_lines_at_most() -> None:
    assert len(MODULE.splitlines()) <= 60


def test_plain_torch_and_megatron_train_by_it(environment: dict[str, str]) -> None:
    pytest.importorskip("megatron.core")
    done = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "stage 1     F0 F1 B0" in done.stdout
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    for usual, eager in (results[:2], results[2:]):
        assert eager["losses"] == usual["losses"]
        assert eager["weights"] == usual["weights"]
        assert eager["actions"] != usual["actions"]
        assert eager["actions"][3][:3] == ["F0", "F1", "B0"]
        assert (usual["peaks"], eager["peaks"]) == ([4, 3, 2, 1], [4, 4, 3, 2])


def test_deepspeed_trains_by_it(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    sections = [{"schedule": "1f1b"}, {"schedule": "eager"}]
    cases = [{"stages": 4, "config": {"evenpipe": section}, "measure": True} for section in sections]
    (usual, eager), _ = run_cases("train_tiny.py", cases, tmp_path)
    for of_usual, of_eager in zip(usual, eager, strict=True):
        assert of_eager["engine"] == "EvenPipeEngine"
        assert of_eager["losses"] == of_usual["losses"]
        assert of_eager["weights"] == of_usual["weights"]
    assert [rank["peak_units"] for rank in eager] == [4, 4, 3, 2]
