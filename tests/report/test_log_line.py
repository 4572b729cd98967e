"""What each stage held, moved and waited for, as a line and as scalars."""

from evenpipe.report.log_line import kept_line, log_line, scalars
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
