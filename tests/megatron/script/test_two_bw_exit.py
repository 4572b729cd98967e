"""Whether to stop is asked in the background, and acted on one iteration later."""

import functools
from argparse import Namespace
from unittest.mock import MagicMock, Mock

import pytest
import torch

from evenpipe.megatron_lm.two_bw.exit import ExitDecision
from evenpipe.schedule import find
from evenpipe.two_bw.gradients import Gradients
from evenpipe.two_bw.stream import TwoBW


@pytest.fixture
def on_cpu(alone, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def stepping():
    """2BW with a step that is submitted, and whose figures are still to be gathered."""
    gradients = Mock(
        Gradients, versions=MagicMock(in_place=False), exchange=None, loss_scale=None, param_groups=[], decides=False
    )
    gradients.hold.return_value = torch.zeros(1)
    two_bw = TwoBW(gradients, find("2bw"), bpipe=False)
    two_bw.submit()
    return two_bw


class Megatron:
    """Its decision, which looks at the arguments: what it was let to ask, and what it found."""

    def __init__(self, args):
        self.args = args
        self.asked = []

    def decide(self):
        self.asked.append((self.args.exit_signal_handler, self.args.exit_duration_in_mins))
        return self.args.exit_signal_handler or self.args.exit_duration_in_mins is not None


@pytest.mark.parametrize("cause", ["signal", "duration"])
def test_a_yes_is_heard_one_iteration_later(cause, on_cpu, monkeypatch):
    args = Namespace(exit_signal_handler=cause == "signal", exit_duration_in_mins=5 if cause == "duration" else None)
    said, ended = [False, False, True, True], []
    monkeypatch.setattr(ExitDecision, "_got_signal" if cause == "signal" else "_time_is_up", lambda self: said.pop(0))
    megatron = Megatron(args)
    decision = ExitDecision(args, stepping(), lambda: ended.append(len(megatron.asked)))
    answers = [decision.made_by(megatron.decide) for _ in range(4)]
    assert answers == [False, False, False, True]
    quiet = (False, None)
    assert megatron.asked == [quiet, quiet, quiet, (cause == "signal", 5 if cause == "duration" else None)]
    # Before Megatron's own question, at which all ranks wait, and before the loop is left.
    assert ended == [3, 4]
    assert vars(args) == {
        "exit_signal_handler": cause == "signal",
        "exit_duration_in_mins": 5 if cause == "duration" else None,
    }


def test_answers_travel_with_the_figures_of_the_step(on_cpu, monkeypatch):
    """The last stage ends an iteration long before the first: what it begins then may not wait for that."""
    args = Namespace(exit_signal_handler=True, exit_duration_in_mins=None)
    said, two_bw, others = [False, True, False], stepping(), []
    monkeypatch.setattr(ExitDecision, "_got_signal", lambda self: said.pop(0))
    decision = ExitDecision(args, two_bw, lambda: None)
    found = []
    for iteration in range(3):
        two_bw.start_with_figures("another", functools.partial(others.append, iteration))
        found.append(decision.made_by(lambda: args.exit_signal_handler))
        assert not decision._exchange.under_way
        assert others == list(range(iteration))
        two_bw.gather()
        assert decision._exchange.under_way
        assert others == list(range(iteration + 1))
        two_bw.update()
        two_bw.submit()
    assert found == [False, False, True]


def test_without_the_flags_nobody_is_asked():
    """There is no process group that anybody could be asked in."""
    args = Namespace(exit_signal_handler=False, exit_duration_in_mins=None)
    ended = []
    decision = ExitDecision(args, stepping(), lambda: ended.append(True))
    assert not decision.made_by(lambda: False)
    assert not ended
    assert decision.made_by(lambda: True)  # --exit-interval
    assert ended
