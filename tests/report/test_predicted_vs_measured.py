"""What was predicted of each stage beside what was measured."""

from evenpipe.report.log_line import Taken, comparison_lines


def test_a_line_a_stage():
    predicted, measured = (
        [Taken(12.3, 3 << 20), Taken(10, 5 << 19)],
        [Taken(12.345, 3 << 20), Taken(9.5, (2 << 20) + 1)],
    )
    assert comparison_lines(["Ett", "tL"], predicted, measured) == [
        "stage 0 (Ett) | ms a micro-batch: 12.30 predicted, 12.35 measured | peak MiB: 3.0 predicted, 3.0 measured |",
        "stage 1 (tL) | ms a micro-batch: 10.00 predicted, 9.50 measured | peak MiB: 2.5 predicted, 2.0 measured |",
    ]
