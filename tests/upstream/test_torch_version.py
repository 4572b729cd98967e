"""A torch that is too old is refused, in one line, before anything is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evenpipe.upstream.installed import OLDEST_TORCH, too_old_torch

ROOT = Path(__file__).parents[2]
OLDEST = ".".join(map(str, OLDEST_TORCH))


def torch_of(version: str, folder: Path) -> None:
    (folder / f"torch-{version}.dist-info").mkdir()
    (folder / f"torch-{version}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("version", "is_old"),
    [("2.6.0", True), ("2.9.0+cu128", True), (f"{OLDEST}.0", False), (f"{OLDEST}.0a0+nv", False), ("3.0.0", False)],
)
def test_older_ones_are_told(version: str, is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_of(version, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    said = too_old_torch()
    assert (said is not None) == is_old
    assert said is None or said.startswith(f"torch {version} is older ")


@pytest.mark.parametrize(
    "call",
    [
        "import evenpipe.megatron; evenpipe.megatron.install()",
        "import evenpipe.deepspeed; evenpipe.deepspeed.install()",
        "from evenpipe.cli.main import main; main(['train', '--engine', 'module'])",
    ],
)
def test_every_way_in_refuses_it_in_one_line(call: str, tmp_path: Path) -> None:
    torch_of("2.6.0", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", call], env=environment, capture_output=True, text=True)
    assert run.returncode == 2, run.stderr
    assert f"torch 2.6.0 is older than what EvenPipe works with: use {OLDEST} or newer" in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


def test_it_is_the_one_declared() -> None:
    assert f'"torch>={OLDEST}"' in (ROOT / "setup.py").read_text()
    assert re.search(rf"torch \({re.escape(OLDEST)} or newer", (ROOT / "README.md").read_text())
    assert f"older than 3.10, {OLDEST} " in (ROOT / "docs" / "doctor.md").read_text()
