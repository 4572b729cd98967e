"""The layout found for a script's own flags is one that the script trains with."""

import sys

import pytest

from evenpipe.layouts.gpt import LayoutError
from evenpipe.layouts.plan import best_layout
from tests.megatron_lm.launch import gpt_flags, launch

SCRIPT = "pretrain_gpt.py"
PP2 = ("--pipeline-model-parallel-size", "2")
VIRTUAL = ("--num-virtual-stages-per-pipeline-rank", "3")
MTP = ("--mtp-num-layers", "1", "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights")


@pytest.fixture
def script(megatron_lm):
    """Its path; a checkout that this Python is too old for is left out."""
    if megatron_lm.name >= "0.17" and sys.version_info < (3, 12):
        pytest.skip("this release needs Python 3.12")
    return str(megatron_lm / SCRIPT)


@pytest.mark.every_release
@pytest.mark.parametrize("flags", [MTP, VIRTUAL], ids=["MTP", "virtual stages"])
def test_a_script_trains_with_the_layout_found_for_its_flags(megatron_lm, script, flags):
    plan, _ = best_layout([script, *gpt_flags(2), *PP2, *flags])
    assert plan.best.max_stage_ms <= plan.even.max_stage_ms
    assert plan.layout.count("|") == (5 if flags == VIRTUAL else 1)
    others = () if flags == VIRTUAL else flags
    layout = ("--pipeline-model-parallel-layout", plan.layout)
    assert len(launch(megatron_lm, SCRIPT, 2, [*gpt_flags(2), *PP2, *others, *layout]).lines) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--no-such-flag",), "unrecognized arguments: --no-such-flag"),
        (("--num-attention-heads", "5"), "Megatron refuses these flags: assert args.hidden_size % "),
        (("--num-layers", "12", "--pipeline-model-parallel-size", "16"), "has only 14 layers"),
    ],
)
def test_what_megatron_refuses_is_said_in_one_line(script, flags, message):
    with pytest.raises(LayoutError) as raised:
        best_layout([script, *gpt_flags(2), *PP2, *flags])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
