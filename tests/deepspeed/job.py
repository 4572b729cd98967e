"""Runs a script's cases with real engines, in one job of four processes on CPU: two replicas where stages are two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["run_cases"]

_LONGEST_SECONDS: Final = 800


def run_cases(script: str, cases: Sequence[Any], folder: Path) -> tuple[list[Any], str]:
    """What `script`, of this folder, found for each of `cases`, and what the job said on standard error."""
    given, out = folder / "cases.json", folder / "out.json"
    given.write_text(json.dumps(cases))
    path = Path(__file__).with_name(script)
    done = subprocess.run(
        [sys.executable, str(path), str(given), str(out)],
        capture_output=True,
        text=True,
        timeout=_LONGEST_SECONDS,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found: list[Any] = json.loads(out.read_text())
    return found, done.stderr
