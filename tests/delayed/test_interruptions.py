"""Evaluations, saves and resumes change no bit of a run in fp16, in which steps are skipped (DeepSpeed: its tests)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")

SCRIPT = Path(__file__).with_name("interrupted_megatron.py")


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode refuses machines with CUDA")
def test_they_change_nothing_with_megatron(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, tmp_path], capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        plain, interrupted = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert interrupted == plain
    assert plain["scale"] < 2.0**20, "steps have been skipped"
    assert len(set(map(str, plain["losses"]))) > 5, "others have not"
