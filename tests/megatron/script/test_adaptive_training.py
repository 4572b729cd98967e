"""What --group-size auto may cut in a script, and what it tells Megatron meanwhile."""

import re
from argparse import Namespace

import pytest

from evenpipe.megatron.unsupported import why_one_size
from evenpipe.megatron_lm.hooks import with_values


def test_megatron_is_told_of_the_size_for_the_time_of_a_batch():
    args = Namespace(micro_batch_size=4)
    with with_values(args, micro_batch_size=2):
        assert args.micro_batch_size == 2
    with pytest.raises(RuntimeError), with_values(args, micro_batch_size=8):
        raise RuntimeError
    assert args.micro_batch_size == 4


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({}, None),
        ({"eod_mask_loss": True, "calculate_per_token_loss": True}, None),
        ({"eod_mask_loss": True}, "--eod-mask-loss makes .*: add --calculate-per-token-loss$"),
        ({"tp_comm_overlap": True, "calculate_per_token_loss": True}, "--tp-comm-overlap has buffers of one "),
        ({"sft": True, "calculate_per_token_loss": True}, "--sft packs sequences into rows, "),
        ({"mtp_num_layers": 1}, "--mtp-num-layers has losses in the log "),
        ({"num_experts": 4, "moe_router_load_balancing_type": "none"}, None),
        (
            {"num_experts": 4, "moe_router_load_balancing_type": "none", "moe_expert_capacity_factor": 1.0},
            "--moe-expert-capacity-factor drops tokens by how many a micro-batch has",
        ),
        ({"variable_seq_lengths": True}, "--variable-seq-lengths gives micro-batches lengths of their own, "),
    ],
)
def test_why_micro_batches_stay_as_they_are(others, said):
    found = why_one_size(Namespace(**{"calculate_per_token_loss": False} | others))
    assert (found is None) == (said is None)
    assert said is None or re.match(said, found)
