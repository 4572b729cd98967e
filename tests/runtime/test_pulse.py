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
SAID = {
    "watched": r"rank 2 \(stage 2\) has given no sign of life for \d+ s",
    "amid": r"rank 2 \(stage 2\) has given no sign of life for \d+ s",
    "before": r"rank 2 \(stage 2\) has not come to open its links",
}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="SIGSTOP, and fork")
@pytest.mark.parametrize("case", SAID)
def test_a_silent_rank_is_named_by_all_that_wait(case: str, tmp_path: Path) -> None:
    """Its neighbours wait for it, and the others for them; all began to at about the same time."""
    run = subprocess.run([sys.executable, SCRIPT, tmp_path, case], timeout=800, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert set(outcome) == {"0", "1", "3"}
    first, (seconds, said) = min(outcome.items(), key=lambda item: item[1][0])
    # The rest is for processes to end, on a busy machine.
    assert seconds < 3 * SECONDS
    line = (
        rf"evenpipe: error: {SAID[case]}: rank {first} \(stage {first}\) waited {SECONDS:g} s for link \w+ \d -> \d: "
        r"look after .* \(Megatron-LM: --distributed-timeout-minutes, DeepSpeed: init_distributed\(timeout=\.\.\.\)\)"
    )
    # Whoever has to be ended, because a group waits for the silent rank when it is torn down, says so after that.
    assert any(re.fullmatch(line, re.sub(r"^\[rank\d\]: ?", "", text)) for text in said.splitlines()), said
    told = [re.findall(r"^evenpipe: rank 2 .* for (?:9|10|11|12) s: look", text, re.M) for _, text in outcome.values()]
    assert [len(each) for each in told] == [case == "watched"] * 3
    for _, others in outcome.values():
        assert not re.search(r"rank [013] \(stage \d\) (has|sends)", others), others
