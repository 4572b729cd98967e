"""A stage that synchronises within its compute waits for what the other has not come to: not in one order of both."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from executor_cases import reference

from tests.reports import reports

SCRIPT = Path(__file__).with_name("synchronised_cases.py")


def test_stages_that_synchronise_come_to_an_end_and_with_receives_posted_ahead_they_do_not(tmp_path):
    """1F1B on two stages: F1 on stage 0 waits for B0's gradient, which waits for stage 1 to wait for F1's output."""
    found = reports(SCRIPT, tmp_path, 2)
    losses, _ = reference(2, 4, "dense")
    assert [ours for ours, _ in found] == [[], losses]
    assert all("Timed out" in ahead or "Connection closed" in ahead for _, ahead in found), found
