"""The releases of megatron-core that EvenPipe works with, and what it relies on in each of them."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from evenpipe.upstream import PRESENT, Distribution, Expectation, Patch, around, verify

__all__ = [
    "MEGATRON_CORE",
    "PARALLEL_STATE",
    "RELEASES",
    "SCHEDULES",
    "Changes",
    "CoreRelease",
    "core_patch",
    "expected",
    "installed_release",
    "members",
    "of_schedules",
    "recorded",
    "since",
]

_SERIES = ("0.14", "0.15", "0.16", "0.17", "0.18", "0.19")

MEGATRON_CORE = Distribution("megatron-core", "megatron.core:__version__", _SERIES)
PARALLEL_STATE = "megatron.core.parallel_state"
SCHEDULES = "megatron.core.pipeline_parallel.schedules"


Changes: TypeAlias = str | Mapping[str, str | None]
"""A signature that is the same in every series, or the series that changed it; None: it is no longer there."""


def since(changes: Changes) -> Mapping[str, str]:
    """Return the signature in every series that has it."""
    if isinstance(changes, str):
        changes = {_SERIES[0]: changes}
    signatures = {}
    current = None
    for series in _SERIES:
        current = changes.get(series, current)
        if current is not None:
            signatures[series] = current
    return signatures


def members(owner: str, names: Iterable[str], changes: Changes = PRESENT) -> dict[str, Changes]:
    """Return the symbols of these names in `owner`, which is a module or "module:Class"."""
    return {f"{owner}{'.' if ':' in owner else ':'}{name}": changes for name in names}


def expected(symbols: Mapping[str, Changes], reason: str | None = None) -> list[Expectation]:
    """Return what a feature calls of megatron-core; with a `reason`, what it sets on single objects."""
    return [Expectation(symbol, MEGATRON_CORE, since(changes), reason) for symbol, changes in symbols.items()]


_FINALIZE = "megatron.core.distributed.finalize_model_grads:finalize_model_grads"
_PROCESS_GROUPS = "megatron.core.process_groups_config"
_GROUPS = ("tp", "pp", "cp", "embd", "pos_embd", "dp_cp")
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
_COMMUNICATION = "megatron.core.pipeline_parallel.p2p_communication"
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
    f"{SCHEDULES}:forward_backward_no_pipelining": PRESENT,
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
    **members(f"{_PROCESS_GROUPS}:GradFinalizeProcessGroups", _GROUPS, {"0.14": PRESENT, "0.15": None}),
    **members(f"{_PROCESS_GROUPS}:ProcessGroupCollection", _GROUPS, {"0.15": PRESENT}),
    f"{_PROCESS_GROUPS}:ProcessGroupCollection.tp_dp_cp": {"0.18": PRESENT},
    f"{_PROCESS_GROUPS}:ProcessGroupCollection.dp": {"0.19": PRESENT},
    **members(
        PARALLEL_STATE,
        (
            *("get_tensor_model_parallel_group", "get_pipeline_model_parallel_group", "get_context_parallel_group"),
            *("get_embedding_group", "get_position_embedding_group"),
        ),
        "(check_initialized=True)",
    ),
    f"{PARALLEL_STATE}:get_data_parallel_group": {
        "0.14": "(with_context_parallel=False, partial_data_parallel=False)",
        "0.16": "(with_context_parallel=False, partial_data_parallel=False, independent_all_gather=False)",
        "0.18": "(with_context_parallel=False, partial_data_parallel=False)",
        "0.19": "(with_context_parallel=False, with_gtp_remat=True, partial_data_parallel=False)",
    },
    f"{PARALLEL_STATE}:get_tensor_and_data_parallel_group": {
        "0.14": "(with_context_parallel=False)",
        "0.15": "(check_initialized=True, with_context_parallel=False)",
    },
    f"{_COMMUNICATION}:P2PCommunicator": "(pp_group, config)",
    f"{_COMMUNICATION}:P2PCommunicator.pp_group": PRESENT,
    **members("megatron.core.utils", ("get_model_config", "get_model_type"), "(model)"),
    **members(
        "megatron.core.model_parallel_config:ModelParallelConfig",
        (
            *("timers", "barrier_with_L1_time", "finalize_model_grads_func"),
            *("variable_seq_lengths", "pipeline_dtype", "deallocate_pipeline_outputs"),
            *("num_microbatches_with_partial_activation_checkpoints", "no_sync_func", "grad_sync_func"),
            "param_sync_func",
        ),
    ),
    "megatron.core.transformer.transformer_config:TransformerConfig.calculate_per_token_loss": PRESENT,
    "megatron.core.timers:Timers._log_level": PRESENT,
    "megatron.core.timers:Timer._start_time": PRESENT,
}
_SIGNATURES: Mapping[str, Mapping[str, str]] = {symbol: since(changes) for symbol, changes in _CHANGES.items()}


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
        """Return whether the schedules, and the function that finalizes gradients, take `force_all_reduce`."""
        return _takes(_SIGNATURES[_FINALIZE][self.series], "force_all_reduce")

    def backward_takes(self, argument: str) -> bool:
        """Return whether `backward_step` has a parameter of that name."""
        return _takes(_SIGNATURES[f"{SCHEDULES}:backward_step"][self.series], argument)


def _takes(signature: str, argument: str) -> bool:
    return re.search(rf"\b{argument}\b", signature) is not None


_GRAD_FINALIZE = ("grad_finalize_pgs", f"{_PROCESS_GROUPS}:GradFinalizeProcessGroups")
_COLLECTION = ("pg_collection", f"{_PROCESS_GROUPS}:ProcessGroupCollection")

RELEASES: Mapping[str, CoreRelease] = {
    "0.14": CoreRelease("0.14", *_GRAD_FINALIZE, _GROUPS),
    **{series: CoreRelease(series, *_COLLECTION, _GROUPS) for series in ("0.15", "0.16", "0.17")},
    "0.18": CoreRelease("0.18", *_COLLECTION, (*_GROUPS, "tp_dp_cp")),
    "0.19": CoreRelease("0.19", *_COLLECTION, (*_GROUPS, "tp_dp_cp", "dp")),
}


def installed_release() -> CoreRelease:
    """Return the release that an import of megatron.core loads, with every signature verified.

    Raises UpstreamError naming the version when it is not supported, or the first symbol that is not as recorded.
    """
    release = RELEASES[MEGATRON_CORE.series(RELEASES)]
    verify(of_schedules())
    return release


def of_schedules() -> list[Expectation]:
    """Return what a schedule calls of megatron-core, in every series."""
    return expected(_CHANGES)


def recorded(symbol: str) -> Mapping[str, str]:
    """The recorded signature of `symbol` in every series that has it; what a Patch or an Expectation asks for."""
    return _SIGNATURES[symbol]


def core_patch(
    name: str,
    symbol: str,
    call: Callable[..., Any],
    reason: str,
    signature: Changes | None = None,
    rebinds: bool = False,
) -> Patch:
    """The patch of a symbol of megatron-core: one recorded here, or of that `signature`; `call` goes :func:`around`.

    With `rebinds`, whatever other loaded module holds the symbol gets the replacement too.
    """
    versions = recorded(symbol) if signature is None else since(signature)
    return Patch(name, (symbol,), MEGATRON_CORE, versions, around(call), reason, rebinds)
