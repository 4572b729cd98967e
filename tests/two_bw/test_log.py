"""The lines that say which iteration a loss and a norm belong to, and what the second weight version costs."""

from typing import NamedTuple

from evenpipe.two_bw.log import memory_line, step_line


class Step(NamedTuple):
    updated: bool
    grad_norm: float | None


def test_loss_and_norm_are_of_two_iterations():
    line = step_line((7, 7), (6, Step(True, 1.23449)))
    assert line == "iteration 7 | loss of iteration 7 | grad norm 1.234 of iteration 6 |"


def test_a_mean_names_its_iterations():
    line = step_line((5, 8), (7, Step(True, None)))
    assert line == "iteration 8 | loss of iterations 5 to 8 | no grad norm of iteration 7 |"


def test_before_the_first_step_after_the_last_and_a_skipped_one():
    assert step_line((1, 1), None) == "iteration 1 | loss of iteration 1 | no step finished yet |"
    assert step_line((4, 4), None, 3) == "iteration 4 | loss of iteration 4 | the grad norm is of iteration 3 |"
    assert step_line(None, (9, Step(True, 2.0))) == "grad norm 2.000 of iteration 9 |"
    assert step_line(None, (9, Step(False, None))) == ("no grad norm of iteration 9: its step was skipped |")


def test_memory_is_the_largest_of_each_stage():
    rows = [(0, 3 << 20, 0), (1, 1 << 20, 4 << 20), (0, 3 << 20, 1 << 19), (1, 2 << 20, 0)]
    assert memory_line(rows) == "2bw | second weight version MiB: 3.0 2.0 | held gradients MiB: 0.5 4.0 |"
    assert memory_line([(0, 0, 0)], "paci") == "paci | second weight version MiB: 0.0 | held gradients MiB: 0.0 |"
