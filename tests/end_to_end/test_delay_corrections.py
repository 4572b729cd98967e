"""Corrections of 2BW's delay on a parabola: what they take gradients at, and which rates are stable.

That pipelines train by them: `test_two_bw_optimizers.py`.
"""

import pytest
import torch

from tests.oracle.recurrence import TwoBWUpdates, descend

RATES = [0.1, 0.2, 0.3, 0.25, 0.15, 0.05]


def test_error_feedback_is_prediction_seen_from_where_gradients_are_taken() -> None:
    """V(t+1) = V(t) - s(t) - (s(t) - s(t-1)), on a parabola of curvature 0.7."""
    weight = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    updates = TwoBWUpdates(torch.optim.SGD([weight], lr=1.0), 1, ahead=1.0)
    descend(updates, lambda batch, weights: [0.7 * weights[0]], RATES)
    trained, steps = [2.0], [0.0]
    for batch, rate in enumerate(RATES):
        steps.append(rate * 0.7 * trained[max(batch - 1, 0)])
        trained.append(trained[batch] - steps[-1] - (steps[-1] - steps[-2]))
    assert updates.foremost[0].item() == pytest.approx(trained[-1], rel=1e-12)


@pytest.mark.parametrize(
    ("delay", "momentum", "ahead", "stable"),
    [
        (1, 0.0, 0.0, 1.0),
        (1, 0.0, 1.0, 0.618),
        (1, 0.9, 0.0, 1.0),
        (1, 0.9, 1.0, 2.70),
        (1, 0.9, 0.9, 2.51),
        (0, 0.9, 0.0, 38),
    ],
)
def test_the_largest_stable_rate_on_a_parabola(delay: int, momentum: float, ahead: float, stable: float) -> None:
    """In units of the curvature's inverse, as docs/2bw.md has it: with momentum, looking ahead allows larger ones."""
    for rate, grows in ((0.97 * stable, False), (1.03 * stable, True)):
        weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum, dampening=momentum)
        updates = TwoBWUpdates(optimizer, delay, ahead=ahead)
        (last,) = descend(updates, lambda batch, weights: [weights[0]], [rate] * 2000)
        assert (abs(last.item()) > 1) == grows, rate
