"""What 2bw or paci cannot honour is refused, each by its own mechanism; what is off, or of the other, is not."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron.core import utils
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.energy_monitor import EnergyMonitor
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import StragglerDetector

from evenpipe.megatron.without_flushes import refused_arguments, refused_without_flushes
from evenpipe.megatron_lm.two_bw.training import two_bw_patches
from evenpipe.upstream import PatchSet

ONE_VERSION: list[tuple[str, Any]] = [
    ("fp8_param", True),
    ("fp4_param_gather", True),
    ("overlap_param_gather_with_optimizer_step", True),
    ("mtp_detach_heads", True),
    ("nccl_ub", True),
]
EITHER: list[tuple[str, Any]] = [
    ("dsa_indexer_loss_coeff", 0.01),
    ("delay_wgrad_compute", True),
    ("cuda_graph_impl", "transformer_engine"),
    ("qk_clip", True),
    ("optimizer_cuda_graph", True),
]
BY_ALL_STAGES: list[tuple[str, Any]] = [
    ("clip_grad", 1.0),
    ("fp16", True),
    ("loss_scale", 128.0),  # a constant scale, in bf16 too: a step is skipped where any stage's gradient overflows
    ("calculate_per_token_loss", True),
    ("grad_norm_skip_threshold", 5.0),
    ("fp8", "hybrid"),
    ("untie_embeddings_and_output_weights", False),
]
#: Of Megatron's loop, and whether paci refuses them too.
OF_THE_LOOP = {
    "save_params_interval": (5, False),
    "non_persistent_ckpt_type": ("local", False),
    "save_wgrads_interval": (5, True),
    "save_tokens_per_expert_interval": (5, True),
    "moe_routing_trace_path": ("traces", True),
    "moe_expert_rank_capacity_factor": (1.5, True),
    "iterations_to_skip": ([3], True),
}


def refused(in_place: bool, **settings: Any) -> list[str]:
    return [refusal.setting for refusal in refused_without_flushes(SimpleNamespace(**settings), in_place)]


@pytest.mark.parametrize(("setting", "value"), ONE_VERSION)
def test_what_knows_one_weight_version_only_goes_with_paci_only(setting: str, value: Any) -> None:
    assert refused(False, **{setting: value}) == [setting]
    assert refused(True, **{setting: value}) == []


@pytest.mark.parametrize(("setting", "value"), EITHER)
def test_what_goes_with_neither_is_refused_by_a_mechanism_of_the_schedule(setting: str, value: Any) -> None:
    for in_place, other in ((False, "paci"), (True, "2bw")):
        [refusal] = refused_without_flushes(SimpleNamespace(**{setting: value}), in_place)
        assert refusal.setting == setting
        assert other not in refusal.reason


@pytest.mark.parametrize(("setting", "value"), BY_ALL_STAGES)
def test_a_step_that_other_stages_decide_is_refused_under_paci(setting: str, value: Any) -> None:
    assert refused(True, **{setting: value}) == [setting]
    assert refused(False, **{setting: value}) == []


@pytest.mark.parametrize("setting", OF_THE_LOOP)
def test_what_reads_or_runs_a_batch_at_another_time_is_refused(setting: str) -> None:
    value, both = OF_THE_LOOP[setting]
    args: Any = SimpleNamespace(**{setting: value})
    for in_place, wanted in ((False, True), (True, both)):
        found = [refusal.setting for refusal in refused_arguments(args, in_place, bpipe=False)]
        assert found == ([setting] if wanted else [])


@pytest.mark.parametrize(("setting", "value"), [("profile", True), ("train_sync_interval", 5)])
def test_a_wait_for_the_whole_device_is_refused_with_bpipe_only(setting: str, value: Any) -> None:
    args: Any = SimpleNamespace(**{setting: value})
    for in_place in (False, True):
        assert not [*refused_arguments(args, in_place, bpipe=False)]
        [refusal] = refused_arguments(args, in_place, bpipe=True)
        assert f"--{setting.replace('_', '-')}" in refusal.why
        assert "waits for the whole device" in refusal.why


def test_what_joins_all_stages_at_an_interval_is_not_refused() -> None:
    flags = {"log_energy": True, "log_straggler": True, "check_weight_hash_across_dp_replicas_interval": 3}
    args: Any = SimpleNamespace(**flags, log_max_attention_logit=True, log_params_norm=True)
    assert not [*refused_arguments(args, False, bpipe=True)]


class _Interrupted(Exception):
    """Instead of the wait for all ranks that would follow."""


class _Training:
    """As much of `TwoBWLoop` as its patches call here."""

    def interrupt(self) -> None:
        raise _Interrupted


def test_each_such_function_interrupts_the_stream_before_it_begins() -> None:
    calls: dict[str, Callable[[], Any]] = {
        "hashes": lambda: utils.check_param_hashes_across_dp_replicas([]),
        "stragglers": lambda: StragglerDetector().report(),
        "energy": lambda: EnergyMonitor().lap(),
    }
    patches = PatchSet("2bw", [patch for patch in two_bw_patches(_Training()) if patch.name in calls])
    patches.apply()
    try:
        for call in calls.values():
            with pytest.raises(_Interrupted):
                call()
    finally:
        patches.revert()


def test_what_is_off_is_not_refused() -> None:
    off = {"grad_norm_skip_threshold": float("inf"), "untie_embeddings_and_output_weights": True, "fp8": None}
    assert refused(True, **off) == []
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2)
    plain = config, DistributedDataParallelConfig(), OptimizerConfig(clip_grad=0.0, bf16=True)
    for in_place in (False, True):
        assert not [refusal for settings in plain for refusal in refused_without_flushes(settings, in_place)]


def test_2bw_accepts_quantised_products_and_any_optimizers_state() -> None:
    assert refused(False, fp8="hybrid", fp4="e2m1") == []
    states = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}
    assert refused(False, **states, num_distributed_optimizer_instances=2, grad_norm_skip_threshold=5.0) == []
