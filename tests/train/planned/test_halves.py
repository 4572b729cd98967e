"""A plan for a schedule with backwards in two halves says what stages really save, between the halves too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.job_server import HUGGING_FACE, run_script

UNTIED = "gpt2 with weights of its own for the output"
_CASES: list[list[Any]] = [
    ["stack", "zb-h1", 4, 1],
    [UNTIED, "zb-h1", 4, 1],
    ["stack", "v-half", 2, 2],
    ["stack", "zbv", 2, 2],
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[int, int]]]:
    """For each case, for each stage, the predicted and the measured peak of saved bytes."""
    folder = tmp_path_factory.mktemp("halves")
    (folder / "cases.json").write_text(json.dumps(_CASES))
    script = Path(__file__).with_name("measured_cases.py")
    done = run_script(HUGGING_FACE, script, folder / "cases.json", folder / "out.json")
    assert done.returncode == 0, done.stderr
    found: list[list[tuple[int, int]]] = json.loads((folder / "out.json").read_text())
    return found


@pytest.mark.parametrize("case", range(len(_CASES)), ids=lambda case: " ".join(map(str, _CASES[case])))
def test_predicted_peaks_are_the_measured_ones(results: list[list[tuple[int, int]]], case: int) -> None:
    for predicted, measured in results[case]:
        assert predicted == pytest.approx(measured, rel=0.02)
