"""Rows of ranks are aligned; a run that does not get to the iteration says so."""

import atexit
from pathlib import Path

import pytest

from evenpipe.runtime.timing import HostClock
from evenpipe.tracing.iteration import IterationTrace, Row, TracedJob


def test_ranks_are_aligned_by_what_most_barriers_say() -> None:
    """A rank that was held up once, at the last barrier, would else have everything too early."""
    first = Row([0, 0], "stage 0", [3.0, 2.0, 1.0, 0.0], [("F0", 1.0, 2.0)])
    held_up = Row([0, 1], "stage 1", [10.0, 9.1, 8.0, 0.0], [("F0", 1.0, 2.0)])
    assert [span[1:] for span in first.timeline(first)] == [(1.0, 2.0)]
    assert [span[1:] for span in held_up.timeline(first)] == [pytest.approx((8.0, 9.0))]


def test_a_run_that_ends_before_says_so_on_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_the_end, said = [], []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(atexit, "register", at_the_end.append)
    for rank, wanted in ((0, 9), (0, 2), (1, 9)):
        numbers = iter((5, 6))
        trace = IterationTrace(Path("T.json"), wanted, TracedJob(rank, numbers.__next__, None, said.append))
        for _ in range(2):
            trace.batch_started(HostClock())
            trace.batch_ended()
    for tell in at_the_end:
        tell()
    assert said == [
        f"no timeline in {tmp_path}/T.json: iteration {wanted} did not come, this run trained 5 to 6"
        for wanted in (9, 2)
    ]
