"""What EvenPipe's schedules cannot honour is refused before a batch, in one line that names the setting."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron.core.transformer.transformer_config import TransformerConfig

from evenpipe.megatron.refusals import refuse_unsupported
from evenpipe.megatron.schedule import PipelineSchedule, in_place_of_megatron
from evenpipe.megatron.supported import installed_release

PLAIN = SimpleNamespace(ddp_config=SimpleNamespace(overlap_grad_reduce=False))
ALWAYS: dict[str, Any] = {
    "overlap_moe_expert_parallel_comm": True,
    "variable_seq_lengths": True,
    "enable_cuda_graph": True,
    "cuda_graph_impl": "local",
    "fine_grained_activation_offloading": True,
}
WITH_BPIPE: dict[str, Any] = {
    "num_moe_experts": 4,
    "cpu_offloading": True,
    "num_microbatches_with_partial_activation_checkpoints": 1,
    "distribute_saved_activations": True,
    "external_cuda_graph": True,
    "cuda_graph_impl": "transformer_engine",
}


def config(**settings: Any) -> TransformerConfig:
    """A real configuration; `settings` are set afterwards, because they would ask for others."""
    made = TransformerConfig(
        num_layers=8,
        hidden_size=16,
        num_attention_heads=2,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=settings.pop("virtual", None),
        pipeline_dtype="float32",
    )
    for name, value in settings.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("bpipe", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_megatrons_defaults_pass(bpipe: bool, chunks: int) -> None:
    refuse_unsupported(config(virtual=chunks if chunks > 1 else None), bpipe, [PLAIN] * chunks, bpipe)


@pytest.mark.parametrize("bpipe", [False, True])
@pytest.mark.parametrize(("setting", "value"), ALWAYS.items())
def test_a_setting_that_breaks_the_schedule_is_refused(setting: str, value: object, bpipe: bool) -> None:
    with pytest.raises(ValueError, match=rf"^{setting}\b.*: (turn it off|set it to none)") as refusal:
        refuse_unsupported(config(**{setting: value}), bpipe, [PLAIN], bpipe)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("setting", "value"), WITH_BPIPE.items())
def test_a_setting_that_breaks_only_bpipe_is_refused_with_bpipe_only(setting: str, value: object) -> None:
    refuse_unsupported(config(**{setting: value}), False, [PLAIN], False)
    with pytest.raises(ValueError, match=rf"^{setting}\b.*, or (turn BPipe off|BPipe)$") as refusal:
        refuse_unsupported(config(**{setting: value}), True, [PLAIN], True)
    assert "\n" not in str(refusal.value)


def test_interleaving_is_refused_in_groups_other_than_the_pipeline() -> None:
    grouped = config(virtual=2, microbatch_group_size_per_vp_stage=8)
    with pytest.raises(ValueError, match="microbatch_group_size_per_vp_stage=8 ") as refusal:
        refuse_unsupported(grouped, False, [PLAIN] * 2, False)
    assert "pipeline_model_parallel_size=4" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    refuse_unsupported(config(microbatch_group_size_per_vp_stage=8), False, [PLAIN], False)


def test_fused_gradients_that_are_reduced_early_are_recorded_only_with_the_patch() -> None:
    fused, early = (
        config(gradient_accumulation_fusion=True),
        SimpleNamespace(ddp_config=SimpleNamespace(overlap_grad_reduce=True)),
    )
    for model, records in (([PLAIN], True), ([early], False)):
        refuse_unsupported(fused, False, model, records)
    refuse_unsupported(config(), False, [early], True)
    with pytest.raises(ValueError, match=r"^gradient_accumulation_fusion with overlap_grad_reduce .*: apply in_place"):
        refuse_unsupported(fused, True, [early], True)
    patches = in_place_of_megatron(PipelineSchedule())
    patches.apply()
    try:
        refuse_unsupported(fused, True, [early], True)
    finally:
        patches.revert()


def test_experts_of_one_capacity_go_with_bpipe() -> None:
    refuse_unsupported(config(num_moe_experts=4, moe_pad_expert_input_to_capacity=True), True, [PLAIN], True)


def test_every_refused_setting_is_one_of_megatrons() -> None:
    if installed_release().series != "0.16":
        pytest.skip("the newest supported series has all of them")
    for setting in {**ALWAYS, **WITH_BPIPE}:
        assert hasattr(config(), setting)
