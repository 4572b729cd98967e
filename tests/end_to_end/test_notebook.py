"""The notebook runs from its first cell to its last, and what its text says of numbers is what its cells find."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from tests.readme import ROOT

NOTEBOOK = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())


def carried_out(source: str, names: dict[str, Any]) -> None:
    """Run a cell as a kernel does: lines that begin with ! by a shell, the others by Python."""
    lines = source.splitlines()
    for line in lines:
        if line.startswith("!"):
            command = line[1:].replace("evenpipe", f"{sys.executable} -m evenpipe", 1)
            done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
    exec("\n".join(line for line in lines if not line.startswith("!")), names)


def test_all_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    names: dict[str, Any] = {}
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            carried_out("".join(cell["source"]), names)
    assert names["peaks"]["1f1b"] == 4
    assert names["peaks"]["v-half"] <= 0.75 * names["peaks"]["1f1b"]
    assert names["peaks"]["zbv"] <= names["peaks"]["1f1b"]
    assert round(names["bubbles"]["zbv"], 2) == 0.06
    assert names["bubbles"]["v-half"] < names["bubbles"]["1f1b"]
    assert not names["fit"].now["fits"]
    assert "--recompute-granularity" in names["fit"].now["reason"], "in the flags of the line"
    assert "GiB" in capsys.readouterr().out


def test_it_is_a_notebook_without_outputs_of_some_machine() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    for cell in NOTEBOOK["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
