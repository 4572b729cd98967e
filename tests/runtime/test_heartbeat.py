"""A rank that says nothing any more ends the job within the timeout, and is named by those that waited for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("silent_cases.py")
SECONDS = 12.0  # of which a rank that lives may be quiet for a quarter, on a busy machine
NO_SIGN = r"rank 2 \(stage 2\) has given no sign of life for \d+ s"
NOT_OPENED = r"rank 2 \(stage 2\) has not opened its links"
SAID = {
    ("watched", "bpipe"): NO_SIGN,
    ("amid", "bpipe"): NO_SIGN,
    ("amid", "plain"): NO_SIGN,
    ("before", "bpipe"): NOT_OPENED,
    ("before", "plain"): NOT_OPENED,
    ("opening", "bpipe"): NO_SIGN,
    ("opening", "plain"): NO_SIGN,
    ("figures", "plain"): NO_SIGN,
    ("barrier", "plain"): NO_SIGN,
    # Nobody beats there while links are opened: rank 0, which has its own, knows no more of the others.
    ("one connection", "plain"): rf"(rank [13] \(stage [13]\) has not opened its links|{NOT_OPENED}| and )+",
}


IN_THE_GATE = [("watched", "bpipe"), ("figures", "plain")]
assert {*IN_THE_GATE} <= {*SAID}
CASES = [pytest.param(*one, marks=pytest.mark.gate if one in IN_THE_GATE else pytest.mark.long) for one in SAID]


@pytest.mark.skipif(sys.platform != "linux", reason="SIGSTOP, and fork")
@pytest.mark.parametrize(("case", "shape"), CASES)
def test_a_silent_rank_is_named_by_all_that_wait(case: str, shape: str, tmp_path: Path) -> None:
    """Its neighbours wait for it, and the others for them; all began to at about the same time."""
    run = subprocess.run([sys.executable, SCRIPT, tmp_path, case, shape], timeout=800, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert set(outcome) == {"0", "1", "3"}
    # The rest is for processes to end, on a busy machine.
    assert min(seconds for seconds, _ in outcome.values()) < 3 * SECONDS
    named = 0
    for rank, (_, said) in outcome.items():
        line = (
            rf"evenpipe: error: {SAID[case, shape]}: rank {rank} \(stage {rank}\) waited {SECONDS:g} s for "
            r"(link \w+ \d -> \d|what devices of the pipeline are like|figures of all|other ranks): look after .* "
            r"\(torch\.distributed\.init_process_group\(timeout=\.\.\.\)\)"
        )
        # Whoever has lost a peer that ended for this reason says that.
        errors = re.findall(r"^(?:\[rank\d\]: ?)?(evenpipe: error: .*)", said, re.M)
        assert all("rank 2" in error and re.fullmatch(line, error) for error in errors), errors
        named += len(errors)
        told = re.findall(r"^evenpipe: rank 2 .* for (?:9|10|11|12) s: look", said, re.M)
        assert len(told) == (case == "watched" and rank in "13"), said
    assert named
