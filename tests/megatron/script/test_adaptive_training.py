"""What --group-size auto may cut in a script, what it tells Megatron meanwhile, and what it tells the user."""

import re
from argparse import Namespace

import pytest

from evenpipe.megatron.script.adaptive.checks import why_one_size
from evenpipe.megatron.script.adaptive.schedule import micro_batch_size
from evenpipe.tuner.told import Teller
from evenpipe.tuner.tuner import Retune

RETUNE = Retune(11, 2, 2, {"k1b4": 1234.4, "k2b2": 98.76})


@pytest.mark.parametrize(
    ("before", "was"), [(None, ""), ((1, 4), " (was k=1, b=4)"), ((2, 2), " (as before)"), ((2, 4), " (was k=2, b=4)")]
)
def test_a_decision_is_one_line_from_the_iteration_that_megatron_logs_next(before, was):
    said: list[str] = []
    teller = Teller(said.append)
    teller.before = before
    teller.retuned(RETUNE, 1.26)
    assert said == [f"iteration 12: k=2, b=2{was}; estimates: k1b4 1,234 ms, k2b2 98.8 ms; links measured in 1.3 s"]
    assert teller.before == (2, 2)


def test_megatron_is_told_of_the_size_for_the_time_of_a_batch():
    args = Namespace(micro_batch_size=4)
    with micro_batch_size(args, 2):
        assert args.micro_batch_size == 2
    with pytest.raises(RuntimeError), micro_batch_size(args, 8):
        raise RuntimeError
    assert args.micro_batch_size == 4


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({}, None),
        ({"eod_mask_loss": True, "calculate_per_token_loss": True}, None),
        ({"eod_mask_loss": True}, "--eod-mask-loss makes .*: add --calculate-per-token-loss$"),
        ({"tp_comm_overlap": True, "calculate_per_token_loss": True}, "--tp-comm-overlap has buffers of one "),
    ],
)
def test_why_micro_batches_stay_as_they_are(others, said):
    found = why_one_size(Namespace(**{"calculate_per_token_loss": False} | others))
    assert (found is None) == (said is None)
    assert said is None or re.match(said, found)
