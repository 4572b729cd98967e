"""Runs a script's cases with real engines, in one job of four processes on CPU: two replicas where stages are two."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.job_server import run_script

__all__ = ["run_cases"]

_IMPORTED: Final = "deepspeed.pipe,torch._dynamo,torch.optim,evenpipe.deepspeed.engine,torch.multiprocessing"


def run_cases(script: str, cases: Sequence[Any], folder: Path) -> tuple[list[Any], str]:
    """What `script`, of this folder, found for each of `cases`, and what the job said on standard error."""
    given, out = folder / "cases.json", folder / "out.json"
    given.write_text(json.dumps(cases))
    path = Path(__file__).with_name(script)
    done = run_script(_IMPORTED, path, given, out, folder=folder, environment="DS_ACCELERATOR=cpu")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found: list[Any] = json.loads(out.read_text())
    return found, done.stderr
