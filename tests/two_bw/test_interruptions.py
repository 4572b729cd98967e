"""Evaluations, saves and resumes change no bit of a run in fp16, in which steps are skipped (DeepSpeed: its tests)."""

from pathlib import Path

import pytest
import torch

from tests.reports import MEGATRON, reports

pytest.importorskip("megatron.core")

SCRIPT = Path(__file__).with_name("interrupted_megatron.py")


@pytest.mark.gate
@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode refuses machines with CUDA")
def test_they_change_nothing_with_megatron(tmp_path: Path) -> None:
    """By any correction of the delay either."""
    for corrections in reports(SCRIPT, tmp_path, 2, imports=MEGATRON):
        for plain, interrupted in corrections:
            assert interrupted == plain
            assert plain["scale"] < 2.0**20, "steps have been skipped"
        assert len({str(plain["weights"]) for plain, _ in corrections}) == 3
    assert len(set(map(str, plain["losses"]))) > 5, "others have not"
