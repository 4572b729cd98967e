"""The releases of DeepSpeed that EvenPipe works with, and what it relies on in them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from evenpipe.upstream import BUILTIN, Distribution, Expectation

__all__ = ["CHECKPOINTS", "DEEPSPEED", "ENGINE", "INITIALIZE", "RELEASES", "expectations", "recorded"]

DEEPSPEED = Distribution("deepspeed", version_at="deepspeed:__version__")
INITIALIZE = "deepspeed:initialize"
ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"

# Releases one by one: 0.18.5 to 0.19.3 scale the gradients of pipelines wrongly.
RELEASES = ("0.19.4", "0.19.5", "0.19.6", "0.19.7", "0.19.8")

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
        f"{_TOPOLOGY}:PipelineParallelGrid": "(topology=None, process_group=None)",
        f"{_TOPOLOGY}:PipeDataParallelTopology": "(num_pp, num_dp)",
        "deepspeed.runtime.tensor_parallel.init_utils:load_ds_config": "(config)",
        f"{_SCHEDULE}:PipeSchedule": "(micro_batches, stages, stage_id)",
        f"{_SCHEDULE}:TrainSchedule": "(micro_batches, stages, stage_id)",
        **{
            f"{_SCHEDULE}:{instruction}": "(buffer_id, **kwargs)"
            for instruction in ("BufferOpInstruction", "LoadMicroBatch", "ForwardPass", "BackwardPass")
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
        CHECKPOINTS[0]: "(function, *args, **kwargs)",
        CHECKPOINTS[1]: "(function, *args)",
    }
)


def recorded(symbol: str) -> Mapping[str, str]:
    """The recorded signature of `symbol` in every supported release."""
    return MappingProxyType(dict.fromkeys(RELEASES, _SIGNATURES[symbol]))


def expectations() -> list[Expectation]:
    """All symbols that EvenPipe calls or overrides and does not replace."""
    return [Expectation(symbol, DEEPSPEED, recorded(symbol)) for symbol in _SIGNATURES if symbol not in _REPLACED]


_REPLACED = frozenset((INITIALIZE, ENGINE, *CHECKPOINTS))
