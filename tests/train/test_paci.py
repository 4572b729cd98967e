"""A loop of one's own under paci: an evaluation drains it, and what would make a step wait is refused."""

from __future__ import annotations

from pathlib import Path

from tests.reports import reports


def test_an_evaluation_is_on_the_newest_weights_and_training_goes_on_by_the_rule(tmp_path: Path) -> None:
    first, last = reports(Path(__file__).with_name("paci_cases.py"), tmp_path, 2)
    assert first["weights"]
    assert last["weights"]
    assert last["evaluated"]
    for rank in (first, last):
        clipped, corrected = rank["refused"]
        assert clipped.startswith("clip_grad: under paci each stage steps by itself after its own last backward, and")
        assert corrected.startswith("delay_correction=nesterov: corrects gradients that are a batch late, and those of")
