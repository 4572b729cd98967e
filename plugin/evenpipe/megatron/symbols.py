"""List what each feature calls of Megatron beyond schedules, with the signature in every supported series.

A feature verifies its list when it starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from evenpipe.megatron.supported import MEGATRON_CORE, PARALLEL_STATE, Changes, expected, members, since
from evenpipe.upstream import ANY, PRESENT, Distribution, Expectation, Patch, around

__all__ = [
    "ADAPTIVE",
    "CHUNKS",
    "DELAYED",
    "LOGGED_LOSSES",
    "OVERLAPPING",
    "RANDOM_NUMBERS",
    "STATIC_MEMORY",
    "TRAINED",
    "TRAINING",
    "VEE",
    "WEIGHT_GRADIENTS",
    "layer_kinds",
    "training_expected",
    "training_patch",
    "without_processes",
]


_MEGATRON_LM = Distribution("Megatron-LM", "megatron.core:__version__", MEGATRON_CORE.releases)
"""megatron.training states no version; it travels with megatron.core, in a checkout and, from 0.17 on, in the wheel."""

_LOG = (
    "loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag, skipped_iter, grad_norm, "
    "params_norm, num_zeros_in_grad, max_attention_logit, pg_collection=None, is_first_iteration=False"
)
_SAVE = (
    "iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far, "
    "checkpointing_context=None, pipeline_rank=None, expert_rank=None, tensor_rank=None, pipeline_parallel=None, "
    "expert_parallel=None, non_persistent_ckpt=False, train_data_iterator=None, preprocess_common_state_dict_fn=None"
)
_SAVE_GROUPS = "release=False, tp_group=None, pp_group=None, dp_cp_group=None"
_UTILS = "megatron.training.utils"
_INITIALIZE = (
    "allow_no_cuda=False, skip_mpu_initialization=False, get_embedding_ranks=None, get_position_embedding_ranks=None"
)

_CHANGES: Mapping[str, Changes] = {
    "megatron.training.arguments:add_megatron_arguments": "(parser)",
    "megatron.training.arguments:core_transformer_config_from_args": "(args, config_class=None)",
    "megatron.training.arguments:parse_args": "(extra_args_provider=None, ignore_unknown_args=False)",
    "megatron.training.arguments:validate_args": "(args, defaults={})",
    "megatron.training.global_vars:set_global_variables": "(args, build_tokenizer=True)",
    "megatron.training.initialize:initialize_megatron": {
        "0.14": (
            f"(extra_args_provider=None, args_defaults={{}}, ignore_unknown_args=False, {_INITIALIZE}, "
            "parsed_args=None, store=None)"
        ),
        "0.18": f"({_INITIALIZE}, store=None)",
        "0.19": (
            f"({_INITIALIZE}, store=None, skip_model_parallel_init=False, seed_pp_group=None, seed_dp_group=None, "
            "seed_tp_group=None, seed_ep_group=None, seed_etp_group=None, skip_random_seed=False)"
        ),
    },
    "megatron.training:get_signal_handler": "()",
    "megatron.training:get_tensorboard_writer": "()",
    "megatron.training:get_wandb_writer": "()",
    "megatron.training:print_rank_last": "(message)",
    "megatron.training.dist_signal_handler:DistributedSignalHandler._signal_received": PRESENT,
    "megatron.training.initialize:_compile_dependencies": "()",
    "megatron.training.initialize:set_jit_fusion_options": {"0.14": "()", "0.19": "(tp_size=None)"},
    "megatron.training.training:_TRAIN_START_TIME": PRESENT,
    "megatron.training.training:training_log": {
        "0.14": (
            "(loss_dict, total_loss_dict, learning_rate, decoupled_learning_rate, iteration, loss_scale, "
            "report_memory_flag, skipped_iter, grad_norm, params_norm, num_zeros_in_grad)"
        ),
        "0.16": f"({_LOG})",
        "0.18": f"({_LOG}, seqlen_squared_sum_in_batch=None, total_real_tokens_in_batch=None)",
    },
    "megatron.training.training:setup_model_and_optimizer": {
        "0.14": (
            "(model_provider_func, model_type, no_wd_decay_cond=None, scale_lr_cond=None, lr_mult=1.0, "
            "checkpointing_context=None)"
        ),
        "0.16": "(model_provider_func, model_type, checkpointing_context=None)",
        "0.19": (
            "(model_type, model_provider_func=None, checkpointing_context=None, *, cfg_container=None, "
            "pg_collection=None)"
        ),
    },
    "megatron.training.checkpointing:_load_base_checkpoint": PRESENT,
    "megatron.training.training:get_model": PRESENT,
    "megatron.training.models.dist_utils:build_virtual_pipeline_stages": {"0.19": PRESENT},
    "megatron.training.training:print_datetime": {"0.14": "(string)", "0.16": "(string, override_timestamp=None)"},
    "megatron.training.training:checkpoint_and_decide_exit": (
        "(model, optimizer, opt_param_scheduler, iteration, num_floating_point_operations_so_far, "
        "checkpointing_context, train_data_iterator)"
    ),
    "megatron.training.training:save_checkpoint_and_time": (
        "(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far, "
        "checkpointing_context, non_persistent_ckpt=False, train_data_iterator=None)"
    ),
    "megatron.training.training:consume_seqlen_stats_in_iteration": {"0.18": "()"},
    "megatron.training.checkpointing:save_checkpoint": {
        "0.14": f"({_SAVE})",
        "0.15": f"({_SAVE}, release=False)",
        "0.16": f"({_SAVE}, {_SAVE_GROUPS})",
        "0.19": f"({_SAVE}, {_SAVE_GROUPS}, dp_group=None, expt_dp_group=None, rng_state_key_prefix='')",
    },
    "megatron.training.checkpointing:check_checkpoint_args": {
        "0.14": "(checkpoint_args)",
        "0.19": "(checkpoint_args, skip_args=None)",
    },
    f"{_UTILS}:logical_and_across_model_parallel_group": {"0.14": "(input)", "0.18": None},
    f"{_UTILS}:reduce_max_stat_across_model_parallel_group": {"0.14": "(stat)", "0.18": None},
    f"{_UTILS}:calc_params_l2_norm": {"0.14": "(model, force_create_fp32_copy=False)", "0.18": None},
    f"{_UTILS}.common_utils:calc_params_l2_norm": {"0.18": "(model, force_create_fp32_copy=False)"},
    f"{_UTILS}.common_utils:logical_and_across_model_parallel_group": {
        "0.18": "(input)",
        "0.19": "(input, group=None)",
    },
    f"{_UTILS}.common_utils:reduce_max_stat_across_model_parallel_group": {
        "0.18": "(stat)",
        "0.19": "(stat, group=None)",
    },
}
TRAINING: Mapping[str, Mapping[str, str]] = {symbol: since(changes) for symbol, changes in _CHANGES.items()}


def training_expected(*symbols: str) -> list[Expectation]:
    """Return those of the symbols above that a feature calls."""
    return [Expectation(symbol, _MEGATRON_LM, TRAINING[symbol]) for symbol in symbols]


def training_patch(name: str, symbol: str, call: Callable[..., Any], reason: str) -> Patch:
    """Return the patch of one of the symbols above, wherever it is bound; `call` goes :func:`around` it."""
    return Patch(name, (symbol,), _MEGATRON_LM, TRAINING[symbol], around(call), reason, rebinds=True)


_TRANSFORMER: Final = "megatron.core.transformer"
_DDP: Final = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
_OPTIMIZERS: Final = "megatron.core.optimizer.optimizer"

LOGGED_LOSSES: Final[Mapping[str, Changes]] = {
    f"{_TRANSFORMER}.multi_token_prediction:MTPLossLoggingHelper.tracker": PRESENT,
    f"{_TRANSFORMER}.experimental_attention_variant.dsa:DSAIndexerLossLoggingHelper.tracker": {"0.16": PRESENT},
}
"""Dictionaries, beside the experts', in which models add up losses for the log; a model need not use their modules."""

STATIC_MEMORY: Final = expected(
    {
        f"{PARALLEL_STATE}:get_global_memory_buffer": "()",
        "megatron.core.utils:GlobalMemoryBuffer.buffer": PRESENT,
        **members(_DDP, ("module", "buffers", "expert_parallel_buffers")),
        **members("megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer", ("param_data", "grad_data")),
        **members(f"{_OPTIMIZERS}:ChainedOptimizer", ("chained_optimizers", "is_stub_optimizer")),
        f"{_OPTIMIZERS}:MegatronOptimizer.optimizer": PRESENT,
    }
)
"""What a process holds from batch to batch."""

RANDOM_NUMBERS: Final = expected(
    {
        "megatron.core.tensor_parallel:get_cuda_rng_tracker": (
            "(use_te_rng_tracker=False, inference_rng_tracker=False, use_cudagraphable_rng=False)"
        ),
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.get_states": "(self)",
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.set_states": "(self, states)",
    }
)
"""What leaves Megatron's random numbers as they were."""

ADAPTIVE: Final = (
    *STATIC_MEMORY,
    *RANDOM_NUMBERS,
    *expected(
        {
            f"{_DDP}.zero_grad_buffer": "(self)",
            f"{_TRANSFORMER}.moe.moe_utils:clear_aux_losses_tracker": "()",
            "megatron.core.models.bert.bert_model:BertModel": PRESENT,
            **LOGGED_LOSSES,
        }
    ),
)
"""Of --group-size auto."""


_LAYERS: Final = "megatron.core.tensor_parallel.layers"
_LINEAR: Final = (
    "ctx, input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, grad_output_buffer, "
    "wgrad_deferral_limit, tp_group"
)

WEIGHT_GRADIENTS: Final = expected(
    {
        f"{_LAYERS}:LinearWithGradAccumulationAndAsyncCommunication.forward": {
            "0.14": f"({_LINEAR})",
            "0.19": f"({_LINEAR}, gtp_remat_size)",
        },
        f"{_LAYERS}:prepare_input_tensors_for_wgrad_compute": "(grad_output, all_gathered_input)",
        **members(_LAYERS, ("ColumnParallelLinear", "RowParallelLinear", "custom_bwd")),
        **members(_LAYERS, ("dist_all_gather_func", "dist_reduce_scatter_func")),
    }
)
"""What backwards in two halves call of Megatron's linear layers."""

_COMBINED: Final = (
    "forward_step_func, data_iterator, f_model, num_microbatches, input_tensor, forward_data_store, b_model, "
    "b_input_tensor, b_output_tensor, b_output_tensor_grad, config, f_model_chunk_id=None, pre_forward=None, "
    "pre_backward=None, post_forward=None, post_backward=None, collect_non_loss_data=False, "
    "checkpoint_activations_microbatch=None, is_first_microbatch=False, current_microbatch=None, "
    "encoder_decoder_xattn=False"
)

OVERLAPPING: Final = expected(
    {
        "megatron.core.pipeline_parallel.combined_1f1b:combined_forward_backward_step": {
            "0.14": f"({_COMBINED})",
            "0.18": f"({_COMBINED}, fsdp_wrapper=None)",
        },
        "megatron.core.pipeline_parallel.utils:set_streams": {
            "0.14": "(comp_stream=None, comm_stream=None)",
            "0.17": "(comm_stream=None)",
            "0.18": "(comm_stream=None, high_priority=False)",
        },
    }
)
"""What computes forwards and backwards together, so that experts' messages are hidden."""

DELAYED: Final = (
    *expected(
        {
            "megatron.core.utils:get_te_version": "()",
            "megatron.core.utils:is_te_min_version": "(version, check_equality=True)",
        }
    ),
    *expected(
        {"megatron.core.model_parallel_config:ModelParallelConfig.delay_wgrad_compute": PRESENT},
        "layers are made by it, and Megatron's check allows it with another schedule only",
    ),
)
"""What has a script make Transformer Engine's layers with delayed weight gradients."""

VEE: Final = expected(
    {
        **members(
            "megatron.core.dist_checkpointing.mapping:ShardedTensor",
            ("key", "global_offset", "local_shape", "replica_id"),
        ),
        f"{PARALLEL_STATE}:get_pipeline_model_parallel_rank": "()",
        f"{PARALLEL_STATE}:set_pipeline_model_parallel_rank": "(rank)",
        f"{PARALLEL_STATE}:get_pipeline_model_parallel_group": "(check_initialized=True)",
        f"{PARALLEL_STATE}:default_embedding_ranks": "(pp_ranks)",
        f"{_TRANSFORMER}.transformer_layer:get_transformer_layer_offset": {
            "0.14": "(config, vp_stage=None)",
            "0.15": "(config, vp_stage=None, pp_rank=None)",
        },
        f"{_TRANSFORMER}.multi_token_prediction:MTPLossLoggingHelper.tracker": PRESENT,
        "megatron.core.utils:unwrap_model": "(model, module_instances=None)",
    }
)
"""Of a V-shaped placement."""

_SHARDED_OFFSETS: Final = "(self, prefix='', sharded_offsets=(), metadata=None)"
CHUNKS: Final = expected(
    {f"{_TRANSFORMER}.module:MegatronModule.sharded_state_dict": _SHARDED_OFFSETS},
    "a chunk of a V is saved with the layers that it has in one",
)
"""Of a script's model in a V, beside the patches."""


_MODELS: Final = "megatron.core.models"
_CONFIG: Final = "megatron.core.model_parallel_config:ModelParallelConfig"
_SCHEDULER: Final = "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler"
_TENSOR_PARALLEL: Final = "megatron.core.tensor_parallel"
_ANY_RANK: Final = (
    *("get_pipeline_model_parallel_rank", "get_tensor_model_parallel_rank", "get_data_parallel_rank"),
    "get_expert_model_parallel_rank",
)

_LAYER_KINDS: Final[dict[str, Changes]] = {
    **members(PARALLEL_STATE, ("initialize_model_parallel",)),
    f"{_TENSOR_PARALLEL}:model_parallel_cuda_manual_seed": PRESENT,
    f"{_MODELS}.gpt:GPTModel": PRESENT,
    **members(f"{_MODELS}.gpt.gpt_layer_specs", ("get_gpt_decoder_block_spec", "get_gpt_mtp_block_spec")),
    "megatron.core.transformer.transformer_config:TransformerConfig": PRESENT,
}

TRAINED: Final = (
    *expected(
        {
            **members(PARALLEL_STATE, ("initialize_model_parallel", *_ANY_RANK, "get_data_parallel_group")),
            f"{PARALLEL_STATE}:destroy_model_parallel": "()",
            **members(
                "megatron.core.distributed",
                ("DistributedDataParallel", "DistributedDataParallelConfig", "finalize_model_grads"),
            ),
            **members(
                "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
                ("no_sync", "zero_grad_buffer"),
                "(self)",
            ),
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.start_grad_sync": (
                "(self, *unused)"
            ),
            f"{_MODELS}.bert.bert_layer_specs:bert_layer_local_spec": PRESENT,
            f"{_MODELS}.bert.bert_model:BertModel": PRESENT,
            f"{_MODELS}.gpt:GPTModel": PRESENT,
            f"{_MODELS}.gpt.gpt_layer_specs:get_gpt_layer_local_spec": PRESENT,
            **members("megatron.core.optimizer", ("MegatronOptimizer", "OptimizerConfig", "get_megatron_optimizer")),
            **members(
                "megatron.core.optimizer.optimizer:ChainedOptimizer", ("chained_optimizers", "is_stub_optimizer")
            ),
            _SCHEDULER: PRESENT,
            f"{_SCHEDULER}.step": "(self, increment)",
            f"{_SCHEDULER}.state_dict": "(self)",
            f"{_SCHEDULER}.load_state_dict": "(self, state_dict)",
            "megatron.core.transformer.module:Float16Module": "(config, module)",
            "megatron.core.transformer.transformer_config:TransformerConfig": PRESENT,
            "megatron.core.pipeline_parallel:get_forward_backward_func": PRESENT,
            f"{_TENSOR_PARALLEL}:get_cuda_rng_tracker": PRESENT,
            f"{_TENSOR_PARALLEL}:model_parallel_cuda_manual_seed": PRESENT,
        }
    ),
    *expected(
        members(_CONFIG, ("finalize_model_grads_func", "no_sync_func", "grad_sync_func", "grad_scale_func")),
        "as Megatron-LM's training loop sets them",
    ),
)


def layer_kinds() -> list[Expectation]:
    """Return what is called to build a small model that has each kind of layer once, from a script's flags."""
    of_scripts = training_expected(
        *(f"megatron.training.arguments:{name}" for name in ("parse_args", "validate_args")),
        "megatron.training.arguments:core_transformer_config_from_args",
    )
    return [*of_scripts, *expected(_LAYER_KINDS)]


def without_processes() -> list[Expectation]:
    """Return what of torch is set in a process of its own, where a model is made without memory or other ranks."""
    group = "groups are made of one process, whatever backend is asked for"
    mask = "on the meta device, dropout saves what CUDA's does"
    torch = Distribution("torch")
    return [
        Expectation("torch.distributed.distributed_c10d:new_group", torch, {ANY: PRESENT}, group),
        Expectation("torch.nn.functional:dropout", torch, {ANY: PRESENT}, mask),
    ]
