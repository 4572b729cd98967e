"""The releases of DeepSpeed that EvenPipe works with, and what it relies on in them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from evenpipe.upstream import BUILTIN, PRESENT, Distribution, Expectation

__all__ = ["CHECKPOINTS", "DEEPSPEED", "ENGINE", "INITIALIZE", "RELEASES", "expectations", "recorded"]

# Releases one by one: 0.18.5 to 0.19.3 scale the gradients of pipelines wrongly.
RELEASES = ("0.19.4", "0.19.5", "0.19.6", "0.19.7", "0.19.8")
DEEPSPEED = Distribution("deepspeed", "deepspeed:__version__", RELEASES)
INITIALIZE = "deepspeed:initialize"
ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_MODULE = "deepspeed.runtime.pipe.module:PipelineModule"
_TOPOLOGY = "deepspeed.runtime.pipe.topology"
_SCHEDULE = "deepspeed.runtime.pipe.schedule"
_BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
_FUSED = "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer"
_UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer"
_OVERFLOW = "deepspeed.runtime.utils:CheckOverflow"
_ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"
CHECKPOINTS = (f"{_CHECKPOINTING}:checkpoint", f"{_CHECKPOINTING}:non_reentrant_checkpoint")


def _present(owner: str, *names: str) -> dict[str, str]:
    """Return names in a module, or of a class in one, that only have to be there."""
    return {f"{owner}{'.' if ':' in owner else ':'}{name}": PRESENT for name in names}


_SIGNATURES: Mapping[str, str] = MappingProxyType(
    {
        INITIALIZE: (
            "(args=None, model=None, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None, "
            "distributed_port=29500, mpu=None, dist_init_required=None, collate_fn=None, config=None, mesh_param=None, "
            "config_params=None)"
        ),
        ENGINE: "(has_bool_tensors=False, *super_args, **super_kwargs)",
        # Where both ways to a schedule meet: `_train_schedule()` of 0.19.8, and `train_batch` itself before it.
        f"{ENGINE}._exec_schedule": "(self, pipe_schedule)",
        f"{ENGINE}._INSTRUCTION_MAP": BUILTIN,
        f"{ENGINE}._exec_forward_pass": "(self, buffer_id)",
        f"{ENGINE}._exec_backward_pass": "(self, buffer_id)",
        f"{ENGINE}._send_tensor_meta": "(self, buffer, recv_stage)",
        f"{ENGINE}._recv_tensor_meta": "(self, send_stage)",
        f"{ENGINE}.reset_activation_shape": "(self)",
        f"{ENGINE}.train_batch": "(self, data_iter=None)",
        f"{ENGINE}.set_dataiterator": "(self, iterator)",
        f"{ENGINE}._next_batch": "(self)",
        f"{ENGINE}._exec_optimizer_step": "(self, lr_kwargs=None)",
        f"{ENGINE}._aggregate_total_loss": "(self)",
        f"{ENGINE}.clip_fp32_gradients": "(self)",
        f"{ENGINE}.save_checkpoint": (
            "(self, save_dir, tag=None, client_state={}, save_latest=True, exclude_frozen_parameters=False)"
        ),
        f"{ENGINE}.load_checkpoint": (
            "(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, "
            "load_lr_scheduler_states=True, load_module_only=False, custom_load_fn=None)"
        ),
        f"{ENGINE}.eval_batch": (
            "(self, data_iter, return_logits=False, compute_loss=True, reduce_output='avg', bcast_loss=True, "
            "num_micro_batches=None)"
        ),
        f"{ENGINE}.destroy": "(self)",
        f"{ENGINE}.module_state_dict": "(self, exclude_frozen_parameters=False)",
        f"{ENGINE}.load_module_state_dict": (
            "(self, checkpoint, strict=True, custom_load_fn=None, fetch_z3_params=False, z3_params_to_fetch=None, "
            "allowed_missing_keys=None)"
        ),
        f"{_ENGINE}.steps_per_print": "(self)",
        f"{_ENGINE}.train_batch_size": "(self)",
        "deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator.device_name": "(self, device_index)",
        "deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine.makedirs": (
            "(self, path, exist_ok=False)"
        ),
        "deepspeed.monitor.monitor:MonitorMaster.write_events": "(self, event_list)",
        f"{_TOPOLOGY}:PipelineParallelGrid": "(topology=None, process_group=None)",
        f"{_TOPOLOGY}:PipeDataParallelTopology": "(num_pp, num_dp)",
        "deepspeed.runtime.tensor_parallel.init_utils:load_ds_config": "(config)",
        f"{_SCHEDULE}:PipeSchedule": "(micro_batches, stages, stage_id)",
        f"{_SCHEDULE}:TrainSchedule": "(micro_batches, stages, stage_id)",
        **{
            f"{_SCHEDULE}:{instruction}": "(buffer_id, **kwargs)"
            for instruction in ("LoadMicroBatch", "ForwardPass", "BackwardPass")
        },
        **{
            f"{_SCHEDULE}:{instruction}": "(**kwargs)"
            for instruction in ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep")
        },
        f"{_MODULE}._build": "(self)",
        f"{_MODULE}._set_bounds": "(self, start=None, stop=None)",
        f"{_MODULE}._index_tied_modules": "(self)",
        f"{_MODULE}._synchronize_tied_weights": "(self)",
        f"{_MODULE}.get_tied_weights_and_groups": "(self)",
        f"{_MODULE}.get_additional_losses": "(self)",
        f"{_MODULE}.ckpt_layer_path": "(self, ckpt_dir, local_layer_idx)",
        f"{_MODULE}.ckpt_layer_path_list": "(self, ckpt_dir, local_layer_idx)",
        f"{_BF16}.get_grads_for_norm": "(self, for_clipping=False)",
        f"{_BF16}.clear_hp_grads": "(self)",
        f"{_BF16}.clear_lp_grads": "(self, set_to_none=False)",
        f"{_BF16}.update_hp_grads": "(self, clear_lp_grads=False)",
        f"{_FUSED}.unscale_and_clip_grads": "(self, grad_groups_flat, total_norm, apply_scale=True)",
        f"{_FUSED}._update_scale": "(self, skip)",
        f"{_UNFUSED}.unscale_and_clip_grads": "(self, total_norm, apply_scale=True)",
        f"{_UNFUSED}._update_scale": "(self, skip)",
        f"{_OVERFLOW}.check": "(self, param_groups=None)",
        f"{_OVERFLOW}.has_overflow": "(self, params, has_moe_params=None)",
        f"{_ZERO}.scaled_global_norm": "(self, norm_type=2)",
        f"{_ZERO}.get_grad_norm_direct": "(self, gradients, params, norm_type=2)",
        f"{_ZERO}.check_overflow": "(self, partition_gradients=True)",
        f"{_ZERO}._update_scale": "(self, has_overflow=False)",
        f"{_ZERO}._model_parallel_all_reduce": "(self, tensor, op)",
        **_present(
            ENGINE,
            *("pipe_buffers", "loss", "grad_layer", "next_stage", "prev_stage", "stage_id", "num_stages", "grid"),
            *("micro_batches", "micro_batch_size", "data_iterator", "is_pipe_parallel", "dp_group_loss"),
            *("agg_additional_losses", "is_first_stage", "is_last_stage", "is_pipe_partitioned", "is_grad_partitioned"),
            *("is_model_parallel", "using_bf16_optimizer"),
        ),
        **_present(
            _ENGINE,
            *("optimizer", "device", "global_steps", "checkpoint_engine", "_config", "_curr_ckpt_path"),
            *("gradient_clipping", "fp16_enabled", "bfloat16_enabled", "zero_optimization", "wall_clock_breakdown"),
            *("torch_autocast_enabled", "monitor", "global_samples", "has_moe_layers", "_running_engine_backward"),
        ),
        **_present(
            "deepspeed.runtime.config:DeepSpeedConfig",
            *("_param_dict", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
            "activation_checkpointing_config",
        ),
        **_present(
            f"{_TOPOLOGY}:PipelineParallelGrid",
            *("stage_to_global", "data_parallel_size", "data_parallel_id", "get_data_parallel_id"),
            *("get_pipe_parallel_group", "get_slice_parallel_world_size", "get_slice_parallel_rank"),
            "get_model_parallel_group",
        ),
        **_present(f"{_TOPOLOGY}:ProcessTopology", *("mapping", "ProcessCoord", "get_coord", "get_dim", "world_size")),
        **_present(
            _MODULE,
            *("forward_funcs", "fwd_map", "tied_modules", "tied_weight_attrs", "is_checkpointable_results"),
            *("is_checkpointable_results_interval", "parts", "tied_comms", "stage_id", "loss_fn"),
            *("activation_checkpoint_func", "_topo", "_grid", "_layer_specs", "_local_start", "num_stages"),
            *("world_group", "world_size", "global_rank", "local_rank", "seed_layers", "seed_fn", "base_seed"),
            *("dynamic_shape", "_recursive_getattr", "activation_checkpoint_interval", "ds_pipe_replicated"),
        ),
        **_present(
            _BF16,
            *("using_real_optimizer", "mpu", "bf16_groups", "bf16_groups_flat", "bf16_partitioned_groups"),
            *("fp32_groups_gradients", "fp32_groups_gradients_flat", "fp32_groups_gradient_flat_partition"),
            *("fp32_groups_has_gradients", "partition_count", "immediate_grad_update", "has_moe_layers"),
        ),
        **_present(
            _FUSED,
            *("fused_adam_legacy", "fp16_groups_flat", "mpu", "overflow_checker", "_global_grad_norm", "overflow"),
            *("loss_scale", "has_moe_layers"),
        ),
        **_present(
            _UNFUSED,
            *("fused_lamb_legacy", "mpu", "overflow_checker", "_global_grad_norm", "overflow", "loss_scale"),
        ),
        **_present(
            _ZERO,
            *("cpu_offload", "use_grad_accum_attribute", "bit16_groups_flat", "parallel_partitioned_bit16_groups"),
            *("averaged_gradients", "gradient_accumulation_dtype", "partition_count", "params_in_partition"),
            *("first_offset", "overflow", "loss_scale", "model_parallel_rank", "check_grad_overflow"),
        ),
        **_present("deepspeed.accelerator", "get_accelerator"),
        **_present("deepspeed.pipe", "LayerSpec", "TiedLayerSpec", "PipelineModule"),
        **_present(f"{_SCHEDULE}", "PipeInstruction"),
        "deepspeed.checkpoint.utils:clone_tensors_for_torch_save": PRESENT,
        "deepspeed.runtime.state_dict_factory:SDLoaderFactory.get_sd_loader": PRESENT,
        "deepspeed.runtime.utils:set_random_seed": "(seed)",
        "deepspeed.runtime.utils:is_model_parallel_parameter": "(p)",
        "deepspeed.moe.utils:is_moe_param": "(param)",
        **_present("deepspeed.moe.layer:MoE", "expert_group_name"),
        "deepspeed.utils.groups:_get_expert_parallel_group": "(group_name)",
        "deepspeed.utils.groups:_get_expert_parallel_rank": "(group_name)",
        "deepspeed.utils.groups:_get_expert_data_parallel_rank": "(group_name)",
        CHECKPOINTS[0]: "(function, *args, **kwargs)",
        CHECKPOINTS[1]: "(function, *args)",
    }
)


def recorded(symbol: str) -> Mapping[str, str]:
    """Return the recorded signature of `symbol` in every supported release."""
    return MappingProxyType(dict.fromkeys(RELEASES, _SIGNATURES[symbol]))


def expectations() -> list[Expectation]:
    """Return all symbols that EvenPipe calls, overrides, or sets on single objects, and does not replace everywhere."""
    called = [symbol for symbol in _SIGNATURES if symbol not in _REPLACED]
    return [Expectation(symbol, DEEPSPEED, recorded(symbol), _REASONS.get(symbol)) for symbol in called]


_REPLACED = frozenset((INITIALIZE, ENGINE, *CHECKPOINTS))


def _of(owner: str, reason: str, *names: str) -> dict[str, str]:
    return {f"{owner}.{name}": reason for name in names}


_PLANNED = "layers are dealt out anew, as a partition or a placement says, on the PipelineModule that was given"
_STEP = "2bw: a step sees the gradients that were kept for it, and the norm that all stages have"
_SIZES = '"group_size": "auto" cuts batches into micro-batches of another size while a batch runs'
_PASSES = "forward and backward passes are in EvenPipe's order, of which the engine knows only one at a time"

_REASONS: Mapping[str, str] = {
    **_of(
        _MODULE,
        _PLANNED,
        *("forward_funcs", "fwd_map", "tied_modules", "tied_weight_attrs", "is_checkpointable_results"),
        *("is_checkpointable_results_interval", "parts", "tied_comms", "stage_id", "loss_fn", "_topo", "_grid"),
        "ds_pipe_replicated",
    ),
    f"{_MODULE}.activation_checkpoint_func": "keeps inputs of layers where bpipe cannot see them, as torch's does not",
    **_of(ENGINE, _PASSES, "loss", "grad_layer"),
    f"{_ENGINE}._running_engine_backward": "the second half of a backward is one of the engine's too",
    **_of(ENGINE, _SIZES, "micro_batches", "micro_batch_size", "data_iterator"),
    **_of(
        "deepspeed.runtime.config:DeepSpeedConfig",
        _SIZES,
        *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    ),
    **_of(ENGINE, "2bw: losses travel with gradients", "is_pipe_parallel", "dp_group_loss", "agg_additional_losses"),
    **_of(_FUSED, _STEP, "has_moe_layers"),
    **_of(
        _BF16,
        _STEP,
        "mpu",
        "has_moe_layers",
        "fp32_groups_gradient_flat_partition",
        "get_grads_for_norm",
        "clear_hp_grads",
    ),
    **{
        symbol: reason
        for each in (_FUSED, _UNFUSED)
        for symbol, reason in _of(
            each,
            _STEP,
            *("unscale_and_clip_grads", "overflow_checker", "mpu", "_global_grad_norm", "_update_scale", "overflow"),
            "loss_scale",
        ).items()
    },
    **_of(
        _ZERO,
        _STEP,
        *("scaled_global_norm", "check_overflow", "_update_scale", "_model_parallel_all_reduce", "overflow"),
        *("loss_scale", "model_parallel_rank", "check_grad_overflow"),
    ),
}
