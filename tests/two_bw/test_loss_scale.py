"""What comes of a step is for the batch after the next, whether or not the stream is drained in between."""

import pytest

from evenpipe.two_bw.gradients import LossScale

SKIPPED = [True, True, False, True, False, False, False, True, False]


class Scaler:
    """Halves after an overflow, doubles after two steps without one."""

    def __init__(self):
        self.scale = 1024.0
        self.good = 0

    def learn(self, overflow):
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.scale /= 2
        elif self.good % 2 == 0:
            self.scale *= 2


def scales(drained=(), resumed=()):
    """What each batch's losses are multiplied by, and its gradients divided by."""
    scaler, found = Scaler(), []
    of = LossScale(lambda: scaler.scale, scaler.learn)
    first = 0  # a run that goes on calls its first batch 1
    submitted = None
    for number, skipped in enumerate(SKIPPED):
        batch = number - first
        of.start_batch(batch)
        if submitted is not None:  # in the middle of this batch
            assert of.submitted == found[-1]
            of.step_ended(batch - 1, submitted)
        found.append(of.present)
        of.submit()
        submitted = skipped
        if number in drained or number in resumed:
            of.step_ended(batch, submitted)
            submitted = None
            of.start_batch(batch + 1)
        if number in resumed:
            unlearnt = of.unlearnt
            assert unlearnt == [skipped]
            of = LossScale(lambda: scaler.scale, scaler.learn)
            of.restart(1, unlearnt)
            first = number
    return found


def test_a_batch_knows_of_all_steps_but_the_last():
    assert scales() == [1024, 1024, 512, 256, 256, 128, 128, 256, 256]


@pytest.mark.parametrize("drained", [(0,), (1, 2), range(9)])
@pytest.mark.parametrize("resumed", [(), (3,), (0, 1, 6)])
def test_drains_and_resumes_change_nothing(drained, resumed):
    assert scales(drained, resumed) == scales()
