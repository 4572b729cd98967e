"""Settings with which a stage cannot step by itself are refused under paci; what is off is not."""

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer import OptimizerConfig

from evenpipe.megatron.in_place import refused_in_place


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("clip_grad", 1.0),
        ("fp16", True),
        ("loss_scale", 128.0),  # a constant scale, in bf16 too: a step is skipped where any stage's gradient overflows
        ("calculate_per_token_loss", True),
        ("grad_norm_skip_threshold", 5.0),
        ("num_moe_experts", 4),
        ("fp8", "hybrid"),
        ("untie_embeddings_and_output_weights", False),
    ],
)
def test_a_step_that_other_stages_decide_is_refused(setting: str, value: Any) -> None:
    [refusal] = refused_in_place(SimpleNamespace(**{setting: value}))
    assert refusal.setting == setting
    assert refusal.remedy.endswith("or use 2bw")


def test_what_is_off_is_not_refused() -> None:
    off = {"grad_norm_skip_threshold": float("inf"), "untie_embeddings_and_output_weights": True, "fp8": None}
    assert not [*refused_in_place(SimpleNamespace(**off))]
    assert not [*refused_in_place(OptimizerConfig(clip_grad=0.0, bf16=True))]
