"""One number for what an iteration takes."""

from __future__ import annotations

from evenpipe.report.log_line import median_ms


def test_the_first_iteration_starts_up_and_does_not_count() -> None:
    assert median_ms([900.0, 10.0, 20.0, 30.0]) == 20.0
    assert median_ms([900.0]) == 900.0
