"""`PipelineTrainer` trains each architecture as one process does: losses, dropout, evaluation and what it saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import forked
from tests.job_server import HUGGING_FACE
from tests.partition.code.test_architectures import ALWAYS, LENGTH, LONG

pytest.importorskip("accelerate")
CASES = Path(__file__).with_name("architectures_cases.py")
SOME = ("vit", "gemma3_text", "gpt2", "t5")
OTHERS = tuple(name for name in ALWAYS | LONG if name not in SOME)
#: Trainer counts the first label of each sample too, which no loss has, where the class names no loss.
SCALES = {"gpt2": (LENGTH - 1) / LENGTH}


@pytest.mark.parametrize("names", [SOME, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["some", "others"])
def test_a_training_is_that_of_one_process(names: tuple[str, ...], tmp_path: Path) -> None:
    run = forked.run(2, HUGGING_FACE, CASES, tmp_path, ",".join(names))
    assert run.returncode == 0, run.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert tuple(first) == names
    for name, found in first.items():
        pipeline, whole, scale = found["pipeline"], found["whole"], SCALES.get(name, 1.0)
        assert pipeline["losses"] == pytest.approx([scale * one for one in whole["losses"]], rel=1e-4), name
        for evaluated in (whole["evaluated"], whole["loaded"]):
            assert pipeline["evaluated"] == pytest.approx(scale * evaluated, rel=1e-4), name
        assert whole["wrong"] == {}, name
        assert whole.get("generated", 2) == 2, name
        for rank in (pipeline, second[name]["pipeline"]):
            assert rank["share"] < 1, name
