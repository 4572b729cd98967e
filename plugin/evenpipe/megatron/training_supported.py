"""What EvenPipe replaces and calls in megatron.training, and its signature in each release of Megatron-LM."""

from collections.abc import Callable, Mapping
from typing import Any

from evenpipe.megatron.supported import MEGATRON_CORE, Changes, since
from evenpipe.upstream import PRESENT, Distribution, Expectation, Patch, around

__all__ = ["TRAINING", "training_expected", "training_patch"]

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
    "megatron.training.training:print_datetime": {"0.14": "(string)", "0.16": "(string, override_timestamp=None)"},
    "megatron.training.training:checkpoint_and_decide_exit": (
        "(model, optimizer, opt_param_scheduler, iteration, num_floating_point_operations_so_far, "
        "checkpointing_context, train_data_iterator)"
    ),
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
    """The patch of one of the symbols above, wherever it is bound; `call` goes :func:`around` it."""
    return Patch(name, (symbol,), _MEGATRON_LM, TRAINING[symbol], around(call), reason, rebinds=True)
