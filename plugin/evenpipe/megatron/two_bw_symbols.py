"""List what 2BW calls and sets of Megatron, and of Transformer Engine, with the signature in every supported series."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from evenpipe.megatron.supported import PARALLEL_STATE, Changes, expected, members
from evenpipe.upstream import ANY, PRESENT, Distribution, Expectation

__all__ = ["QUANTISED", "TWO_BW"]

_DDP: Final = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
_OPTIMIZER: Final = "megatron.core.optimizer.optimizer"
_PLAIN: Final = f"{_OPTIMIZER}:MegatronOptimizer"
_CHAINED: Final = f"{_OPTIMIZER}:ChainedOptimizer"
_HALF: Final = f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params"
_SHARDED: Final = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_SCALER: Final = "megatron.core.optimizer.grad_scaler:MegatronGradScaler"
_CLIP: Final = "megatron.core.optimizer.clip_grads"
_BUFFERS: Final = "megatron.core.distributed.param_and_grad_buffer"
_GROUP: Final = f"{_BUFFERS}:_ParamAndGradBucketGroup"
_GROUPS: Final = "megatron.core.process_groups_config"
_MOE: Final = "megatron.core.transformer.moe"
_GRAD_SYNC: Final = {"0.14": "(self)", "0.16": "(self, force_all_reduce=False)"}

_CALLED: Final[Mapping[str, Changes]] = {
    f"{_CLIP}:clip_grad_by_total_norm_fp32": "(parameters, max_norm, total_norm, use_decoupled_grad=False)",
    **members(_CLIP, ("multi_tensor_applier", "l2_norm_impl")),
    **members(_PLAIN, ("get_grad_stats_parallel_group", "get_parameters"), "(self)"),
    **members(_PLAIN, ("param_groups", "config")),
    **members(_CHAINED, ("chained_optimizers", "is_stub_optimizer")),
    "megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.allgather_params": {"0.16": "(self)"},
    **members(f"{_OPTIMIZER}:FP32Optimizer", ("prepare_grads", "step_with_ready_grads"), "(self)"),
    **members(f"{_OPTIMIZER}:MixedPrecisionOptimizer", ("prepare_grads", "step_with_ready_grads"), "(self)"),
    f"{_OPTIMIZER}:MixedPrecisionOptimizer.grad_scaler": PRESENT,
    f"{_SCALER}.scale": PRESENT,
    f"{_SCALER}.update": "(self, found_inf)",
    **members(_HALF, ("_copy_model_grads_to_main_grads", "_collect_main_grad_data_for_unscaling"), "(self)"),
    **members(_HALF, ("float16_groups", "fp32_from_fp32_groups")),
    **members(
        _SHARDED,
        ("_copy_model_grads_to_main_grads", "_collect_main_grad_data_for_unscaling", "step_with_ready_grads"),
        "(self)",
    ),
    **members(_SHARDED, ("model_float16_groups", "model_fp32_groups", "shard_float16_groups", "shard_fp32_groups")),
    "megatron.core.optimizer.distrib_optimizer:Range.normalize": "(self, start=0)",
    f"{_GROUP}.start_param_sync": "(self, force_sync=False)",
    f"{_GROUP}.buckets": PRESENT,
    **members(
        _DDP, ("buffers", "expert_parallel_buffers", "bucket_groups", "expert_parallel_bucket_groups", "ddp_config")
    ),
    **members(f"{_BUFFERS}:_ParamAndGradBuffer", ("buckets", "grad_data", "data_parallel_group", "ddp_config")),
    **members(f"{_BUFFERS}:_ParamAndGradBucket", ("params", "grad_data")),
    "megatron.core.tensor_parallel:param_is_not_tensor_parallel_duplicate": {
        "0.14": "(param)",
        "0.16": "(param, tp_group=None)",
        "0.19": "(param, tp_group=None, expert_tp_group=None)",
    },
    "megatron.core.transformer.module:param_is_not_shared": "(param)",
    f"{_MOE}.router:TopKRouter._maintain_float32_expert_bias": "(self)",
    f"{_MOE}.moe_utils:get_moe_layer_wise_logging_tracker": {"0.14": "()", "0.18": None},
    f"{_MOE}.moe_utils:get_moe_metrics_tracker": {"0.18": "()"},
    f"{_MOE}.moe_logging:MoEMetricsTracker.metrics": {"0.18": PRESENT},
}

_STEPS: Final = "2bw: a step is submitted in one iteration and finished in the next; what it needs is kept until then"
_ASSIGNED: Final[Mapping[str, Mapping[str, Changes]]] = {
    _STEPS: {
        f"{_DDP}.zero_grad_buffer": "(self)",
        f"{_DDP}.start_param_sync": "(self, *unused, force_sync=False, force_dispatch=False)",
        f"{_DDP}.enable_forward_pre_hook": "(self)",
        f"{_DDP}.disable_forward_pre_hook": "(self, param_sync=True)",
        f"{_PLAIN}.zero_grad": "(self, set_to_none=True)",
        f"{_PLAIN}.step": "(self)",
    },
    "2bw: losses have the loss scale of their own batch": {
        f"{_PLAIN}.scale_loss": "(self, loss)",
        "megatron.core.model_parallel_config:ModelParallelConfig.grad_scale_func": PRESENT,
    },
    "2bw: the optimizer steps with gradients that were kept, which of a distributed one are its shard alone": {
        f"{_SHARDED}._get_model_param_range_map": "(self, param)",
        f"{_BUFFERS}:_ParamAndGradBuffer.main_grad": PRESENT,
    },
    "2bw: weights have two versions, which take turns": {
        f"{_BUFFERS}:_ParamAndGradBuffer.param_data": PRESENT,
        f"{_BUFFERS}:_ParamAndGradBucket.param_data": PRESENT,
        f"{_GROUP}.cached_param_buffer_shard_list": PRESENT,
        f"{_GROUP}.param_gather_handle": PRESENT,
    },
    "2bw: a batch of experts' tokens has counts of its own, and a weight version its bias": {
        **members(f"{_MOE}.router:TopKRouter", ("expert_bias", "local_tokens_per_expert")),
        **members(f"{_MOE}.router:TopKRouter", ("global_tokens_per_expert", "ga_steps"), {"0.15": PRESENT}),
        **members(f"{_MOE}.router:TopKRouter", ("qb_beta", "qb_beta_accum", "qb_beta_count"), {"0.19": PRESENT}),
    },
    "2bw: gradients are reduced beside the next forward, whether or not Megatron overlaps it": {
        f"{_GROUP}.ddp_config": PRESENT,
        f"{_GROUP}.grad_reduce_handle": PRESENT,
        **members(_GROUP, ("start_grad_sync", "finish_grad_sync"), _GRAD_SYNC),
    },
    "2bw: what Megatron would sum over stages while they wait for each other is summed beside what they compute": {
        f"{PARALLEL_STATE}:get_pipeline_model_parallel_group": "(check_initialized=True)",
        **members(f"{_GROUPS}:ProcessGroupCollection", ("pp", "embd", "pos_embd"), {"0.15": PRESENT}),
        **members(f"{_GROUPS}:GradFinalizeProcessGroups", ("embd", "pos_embd"), {"0.14": PRESENT, "0.15": None}),
    },
}

TWO_BW: Final = (
    *expected(_CALLED),
    *(each for reason, symbols in _ASSIGNED.items() for each in expected(symbols, reason)),
)
"""Beside what a schedule calls, and what the training loop of a script is patched with."""

_ENGINE: Final = Distribution("transformer-engine", "transformer_engine:__version__")
QUANTISED: Final = (
    Expectation(
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule._fp8_workspaces",
        _ENGINE,
        {ANY: PRESENT},
        "2bw: each batch has quantised weights of its own, as the next one begins before its backwards end",
    ),
    Expectation("transformer_engine.pytorch.fp8:FP8GlobalStateManager", _ENGINE, {ANY: PRESENT}),
)
"""Symbols of Transformer Engine that 2BW relies on, for models with its layers."""
