"""Lines of a log: what stages held and waited for, predicted beside measured, and an iteration in one number."""

from __future__ import annotations

from evenpipe.report.log_line import Taken, comparison_lines, kept_line, log_line, median_ms, scalars
from evenpipe.runtime.resources import StageFigures

STAGES = (StageFigures(3, 3 << 20, 1 << 19, 0.26), StageFigures(2, 2 << 20, 0, 0.0))


def test_a_line_has_all_stages_in_order_with_units() -> None:
    assert log_line(10, STAGES) == (
        "iteration 10 | peak live: 3 2 | peak saved MiB: 3.0 2.0 | evicted MiB: 0.5 0.0 | "
        "transfers exposed ms: 0.3 0.0 |"
    )


def test_scalars_are_named_by_stage_and_unit() -> None:
    named = scalars(STAGES)
    assert len(named) == 8
    assert (named["evenpipe/peak-live/stage-0"], named["evenpipe/evicted-MiB/stage-1"]) == (3, 0.0)


def test_what_stays_is_named_in_bytes() -> None:
    assert kept_line(1, {"Marked": 3 << 19, "Banded": 1 << 20}) == (
        "stage 1, of a micro-batch: saved in types that cannot be taken apart, not counted nor moved: "
        "Banded 1.0 MiB, Marked 1.5 MiB"
    )


def test_a_line_a_stage():
    predicted, measured = (
        [Taken(12.3, 3 << 20), Taken(10, 5 << 19)],
        [Taken(12.345, 3 << 20), Taken(9.5, (2 << 20) + 1)],
    )
    assert comparison_lines(["Ett", "tL"], predicted, measured) == [
        "stage 0 (Ett) | ms a micro-batch: 12.30 predicted, 12.35 measured | peak MiB: 3.0 predicted, 3.0 measured |",
        "stage 1 (tL) | ms a micro-batch: 10.00 predicted, 9.50 measured | peak MiB: 2.5 predicted, 2.0 measured |",
    ]


def test_the_first_iteration_starts_up_and_does_not_count() -> None:
    assert median_ms([900.0, 10.0, 20.0, 30.0]) == 20.0
    assert median_ms([900.0]) == 900.0
