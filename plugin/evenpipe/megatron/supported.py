"""The releases of megatron-core that EvenPipe works with, and what it relies on in each of them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from evenpipe.upstream import BUILTIN, Distribution, Expectation, Patch, around

__all__ = [
    "LOGGED_LOSSES",
    "MEGATRON_CORE",
    "RELEASES",
    "SCHEDULES",
    "Changes",
    "CoreRelease",
    "core_patch",
    "installed_release",
    "recorded",
    "since",
    "verify_two_buffered",
]

MEGATRON_CORE = Distribution("megatron-core", version_at="megatron.core:__version__")
SCHEDULES = "megatron.core.pipeline_parallel.schedules"

_SERIES = ("0.14", "0.15", "0.16", "0.17", "0.18", "0.19")


Changes: TypeAlias = str | Mapping[str, str | None]
"""A signature that is the same in every series, or the series that changed it; None: it is no longer there."""


def since(changes: Changes) -> Mapping[str, str]:
    """The signature in every series that has it."""
    if isinstance(changes, str):
        changes = {_SERIES[0]: changes}
    signatures = {}
    current = None
    for series in _SERIES:
        current = changes.get(series, current)
        if current is not None:
            signatures[series] = current
    return signatures


_FINALIZE = "megatron.core.distributed.finalize_model_grads:finalize_model_grads"
_PROCESS_GROUPS = "megatron.core.process_groups_config"
_BATCH = (
    "*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, "
    "decoder_seq_length=None, forward_only=False, collect_non_loss_data=False, first_val_step=None, "
    "adjust_tensor_shapes_fn=None, p2p_communicator=None"
)
_PIPELINING = {
    "0.14": f"({_BATCH}, grad_finalize_pgs=None)",
    "0.15": f"({_BATCH}, pg_collection=None)",
    "0.16": f"({_BATCH}, pg_collection=None, force_all_reduce=False)",
}
_TENSOR_SHAPES = "*, seq_length, micro_batch_size, decoder_seq_length, config"

_CHANGES: Mapping[str, Changes] = {
    f"{SCHEDULES}:get_forward_backward_func": {
        "0.14": "()",
        "0.16": "(pp_size=None, vp_size=None)",
        "0.19": "(pp_size=None, vp_size=None, schedule_pg_collection=None)",
    },
    f"{SCHEDULES}:forward_step": (
        "(forward_step_func, data_iterator, model, num_microbatches, input_tensor, forward_data_store, config, "
        "cp_group_size, collect_non_loss_data=False, checkpoint_activations_microbatch=None, "
        "is_first_microbatch=False, current_microbatch=None, vp_stage=None, is_last_stage=True)"
    ),
    f"{SCHEDULES}:backward_step": {
        "0.14": "(input_tensor, output_tensor, output_tensor_grad, model_type, config, pipeline_model_parallel_size=1)",
        "0.15": "(input_tensor, output_tensor, output_tensor_grad, model_type, config)",
        "0.17": "(input_tensor, output_tensor, output_tensor_grad, config)",
    },
    f"{SCHEDULES}:forward_backward_pipelining_without_interleaving": _PIPELINING,
    f"{SCHEDULES}:forward_backward_pipelining_with_interleaving": _PIPELINING,
    f"{SCHEDULES}:deallocate_output_tensor": "(out, deallocate_pipeline_outputs=False)",
    f"{SCHEDULES}:get_tensor_shapes": {
        "0.14": f"({_TENSOR_SHAPES}, tp_group, cp_group)",
        "0.17": f"({_TENSOR_SHAPES}, tp_group=None, cp_group=None)",
    },
    f"{SCHEDULES}:clear_embedding_activation_buffer": "(config, model, is_last_stage)",
    f"{SCHEDULES}:finish_embedding_wgrad_compute": "(config, embedding_module, is_last_stage, tp_group)",
    f"{SCHEDULES}:get_schedule_table": "(num_microbatches, num_model_chunks, microbatch_group_size_per_vp_stage)",
    _FINALIZE: {
        "0.14": "(model, num_tokens=None, grad_finalize_pgs=None)",
        "0.15": "(model, num_tokens=None, pg_collection=None)",
        "0.16": "(model, num_tokens=None, pg_collection=None, force_all_reduce=False)",
    },
    f"{_PROCESS_GROUPS}:GradFinalizeProcessGroups": {"0.14": "()", "0.15": None},
    f"{_PROCESS_GROUPS}:ProcessGroupCollection": {"0.15": "(**kwargs)"},
}
_SIGNATURES: Mapping[str, Mapping[str, str]] = {symbol: since(changes) for symbol, changes in _CHANGES.items()}


_TRANSFORMER = "megatron.core.transformer"
LOGGED_LOSSES: Mapping[str, Mapping[str, str]] = {
    f"{_TRANSFORMER}.multi_token_prediction:MTPLossLoggingHelper.tracker": since(BUILTIN),
    f"{_TRANSFORMER}.experimental_attention_variant.dsa:DSAIndexerLossLoggingHelper.tracker": since({"0.16": BUILTIN}),
}
"""Dictionaries, beside the experts', in which models add up losses for the log; a model need not use their modules."""


# What 2BW calls of megatron-core beyond its schedules.
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_GRAD_SYNC = {"0.14": "(self)", "0.16": "(self, force_all_reduce=False)"}

_OF_TWO_BUFFERED: Mapping[str, Changes] = {
    "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32": (
        "(parameters, max_norm, total_norm, use_decoupled_grad=False)"
    ),
    f"{_OPTIMIZER}:MegatronOptimizer.get_grad_stats_parallel_group": "(self)",
    f"{_OPTIMIZER}:MegatronOptimizer.get_parameters": "(self)",
    f"{_OPTIMIZER}:FP32Optimizer.prepare_grads": "(self)",
    f"{_OPTIMIZER}:FP32Optimizer.step_with_ready_grads": "(self)",
    f"{_OPTIMIZER}:MixedPrecisionOptimizer.prepare_grads": "(self)",
    f"{_OPTIMIZER}:MixedPrecisionOptimizer.step_with_ready_grads": "(self)",
    f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads": "(self)",
    f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params._collect_main_grad_data_for_unscaling": "(self)",
    f"{_DISTRIBUTED}._copy_model_grads_to_main_grads": "(self)",
    f"{_DISTRIBUTED}._collect_main_grad_data_for_unscaling": "(self)",
    f"{_DISTRIBUTED}._get_model_param_range_map": "(self, param)",
    f"{_DISTRIBUTED}.step_with_ready_grads": "(self)",
    f"{_BUCKETS}.start_grad_sync": _GRAD_SYNC,
    f"{_BUCKETS}.finish_grad_sync": _GRAD_SYNC,
    f"{_BUCKETS}.start_param_sync": "(self, force_sync=False)",
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.zero_grad_buffer": "(self)",
    "megatron.core.tensor_parallel.layers:param_is_not_tensor_parallel_duplicate": {
        "0.14": "(param)",
        "0.16": "(param, tp_group=None)",
        "0.19": "(param, tp_group=None, expert_tp_group=None)",
    },
    "megatron.core.transformer.module:param_is_not_shared": "(param)",
}


@dataclass(frozen=True)
class CoreRelease:
    """One series of megatron-core, as far as its schedules are concerned.

    `process_groups_argument` is the name under which schedules take an instance of `process_groups_class`
    ("module:class") and pass it on to `config.finalize_model_grads_func`; `process_groups` are the attributes that they
    set in it when they are given none. `signatures` maps "module:attribute" to the recorded signature.
    """

    series: str
    process_groups_argument: str
    process_groups_class: str
    process_groups: tuple[str, ...]

    @property
    def signatures(self) -> Mapping[str, str]:
        return {symbol: found[self.series] for symbol, found in _SIGNATURES.items() if self.series in found}

    @property
    def takes_force_all_reduce(self) -> bool:
        """Whether the schedules and what finalizes gradients take `force_all_reduce`."""
        return _takes(_SIGNATURES[_FINALIZE][self.series], "force_all_reduce")

    def backward_takes(self, argument: str) -> bool:
        """Whether `backward_step` has a parameter of that name."""
        return _takes(_SIGNATURES[f"{SCHEDULES}:backward_step"][self.series], argument)


def _takes(signature: str, argument: str) -> bool:
    return re.search(rf"\b{argument}\b", signature) is not None


_GROUPS = ("tp", "pp", "cp", "embd", "pos_embd", "dp_cp")
_GRAD_FINALIZE = ("grad_finalize_pgs", f"{_PROCESS_GROUPS}:GradFinalizeProcessGroups")
_COLLECTION = ("pg_collection", f"{_PROCESS_GROUPS}:ProcessGroupCollection")

RELEASES: Mapping[str, CoreRelease] = {
    "0.14": CoreRelease("0.14", *_GRAD_FINALIZE, _GROUPS),
    **{series: CoreRelease(series, *_COLLECTION, _GROUPS) for series in ("0.15", "0.16", "0.17")},
    "0.18": CoreRelease("0.18", *_COLLECTION, (*_GROUPS, "tp_dp_cp")),
    "0.19": CoreRelease("0.19", *_COLLECTION, (*_GROUPS, "tp_dp_cp", "dp")),
}


def installed_release() -> CoreRelease:
    """The release that an import of megatron.core loads, with every signature verified.

    Raises UpstreamError naming the version when it is not supported, or the first symbol that is not as recorded.
    """
    release = RELEASES[MEGATRON_CORE.series(RELEASES)]
    for symbol in release.signatures:
        Expectation(symbol, MEGATRON_CORE, recorded(symbol)).verify()
    return release


def recorded(symbol: str) -> Mapping[str, str]:
    """The recorded signature of `symbol` in every series that has it; what a Patch or an Expectation asks for."""
    return _SIGNATURES[symbol]


def core_patch(
    name: str, symbol: str, call: Callable[..., Any], reason: str, signature: Changes | None = None
) -> Patch:
    """The patch of a symbol of megatron-core: one recorded here, or of that `signature`; `call` goes :func:`around`."""
    versions = recorded(symbol) if signature is None else since(signature)
    return Patch(name, (symbol,), MEGATRON_CORE, versions, around(call), reason)


def verify_two_buffered() -> None:
    """Raise UpstreamError naming the first of what 2BW calls that is not as recorded for the installed release."""
    for symbol, changes in _OF_TWO_BUFFERED.items():
        Expectation(symbol, MEGATRON_CORE, since(changes)).verify()
