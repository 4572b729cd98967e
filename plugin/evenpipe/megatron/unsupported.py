"""Megatron settings under which EvenPipe's schedules cannot keep their promises, refused by name."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from evenpipe.megatron.supported import MEGATRON_CORE, RELEASES

__all__ = [
    "Refusal",
    "captures",
    "overlaps",
    "packs",
    "refusals_of",
    "refuse_unsupported",
    "refused_in_a_v",
    "refused_settings",
    "refused_with_search",
    "refused_with_tuning",
    "unlike_a_v",
    "why_one_size",
]


class Refusal(NamedTuple):
    """A setting, its value where that matters (else ""), why it does not go together with EvenPipe, what to do.

    A release that has no setting of a name does not have what it would do.
    """

    setting: str
    value: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.setting}{self.value and '='}{self.value} {self.reason}: {self.remedy}"

    @property
    def why(self) -> str:
        """Return the flag that asks for the setting, and the reason."""
        theirs = _FLAGS.get(self.setting, f"--{self.setting.replace('_', '-')}")
        return f"{f'{theirs} {self.value}'.rstrip()} {self.reason}"


#: Flags that are not called as the setting is.
_FLAGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "cpu_offloading": "--cpu-offloading-num-layers",
        "fp4": "--fp4-format",
        "fp4_param": "--fp4-param-gather",
        "fp8": "--fp8-format",
        "nccl_ub": "--use-nccl-ub",
    }
)


def _several(number: Any, _: object = None) -> bool:
    return (number or 1) > 1


def _by_chunk(name: str | None, given: Any) -> bool:
    """Return whether checkpoints of that format have layers by their place in a chunk, and there are any."""
    return name not in (None, "torch_dist") and not (given.save is None and given.load is None)


#: Settings that are refused at some of their values, which are then named: by the value and all settings.
_REFUSED_AT: Final[Mapping[str, Callable[[Any, Any], bool]]] = MappingProxyType(
    {
        "gtp_weight_remat_size": _several,
        "tensor_parallel_num_weight_shards": lambda _, given: _several(getattr(given, "gtp_weight_remat_size", 1)),
        "expert_gtp_weight_remat_size": _several,
        "expert_tensor_parallel_num_weight_shards": (
            lambda _, given: _several(getattr(given, "expert_gtp_weight_remat_size", 1))
        ),
        "grad_norm_skip_threshold": lambda threshold, _: math.isfinite(threshold or math.inf),
        "untie_embeddings_and_output_weights": lambda given, _: given is False,
        "cuda_graph_impl": lambda captured, _: captured not in (None, "none"),
        "ckpt_format": _by_chunk,
        "ckpt_convert_format": _by_chunk,
        "vision_pretraining_type": lambda kind, given: kind == "dino" and given.vision_pretraining,
    }
)

_FSDP = "gathers and frees parameters, which would be taken for activations"
_ORDER = "captures Megatron's own order of micro-batches"
_REPLAYED = (
    "replays a whole iteration of Megatron's own order as one CUDA graph, without the host, which posts EvenPipe's "
    "messages and waits for them"
)
_ALWAYS: Mapping[str, str] = {
    "use_megatron_fsdp": _FSDP,
    "use_custom_fsdp": _FSDP,
    "enable_cuda_graph": _ORDER,
    "cuda_graph_impl=local": _ORDER,
    "cuda_graph_impl=full_iteration": _REPLAYED,
    "fine_grained_activation_offloading": "is started anew after each batch by Megatron's own schedules only",
    "moe_paged_stash": "is started anew before each batch by Megatron's own schedules only",
}

_MOVING: Mapping[str, str] = {
    "cpu_offloading": "already moves saved activations",
    "distribute_saved_activations": "keeps saved activations where they cannot be moved",
}
_OWN_MEMORY = "of whole layers keeps all that they save in memory of its own, which cannot be moved"
_SWAPPING: Mapping[str, str] = {
    "overlap_moe_expert_parallel_comm": "computes a forward and a backward together, between which a swap would start",
}
_WHOLE_LAYERS_MOVING: Mapping[str, str] = {
    "external_cuda_graph": _OWN_MEMORY,
    "cuda_graph_impl=transformer_engine": _OWN_MEMORY,
}

_WHOLE = "captures whole backwards"
_WITH_HALVES: Mapping[str, str] = {
    "defer_embedding_wgrad_compute": "puts off the same gradients in its own way",
    "external_cuda_graph": _WHOLE,
    "cuda_graph_impl=transformer_engine": _WHOLE,
}

_LAST_STAGE_LOGS_IT: Final = ("0.14", "0.15")  # the decoupled learning rate
_BY_RANK = "chooses layers by the rank itself, as if stages were interleaved"
_IN_A_V: Mapping[str, str] = {
    "is_hybrid_model": _BY_RANK,
    "hybrid_layer_pattern": _BY_RANK,
    "hybrid_override_pattern": _BY_RANK,
    "non_persistent_ckpt_type=local": ("brings back the embedding and its copy, which are on one rank, as one tensor"),
}
_BY_CHUNK = (
    "counts layers from the start of their chunk and does not say where that is, so that a run with another placement "
    "reads other layers"
)
_FILES_IN_A_V: Mapping[str, str] = {"ckpt_format": _BY_CHUNK, "ckpt_convert_format": _BY_CHUNK}

_UNKNOWN = "so that the memory of a stage is not known"
_RESIZED = "changes the samples of a batch, which are shared out among micro-batches once"
_BY_PLACE = (
    "recomputes a micro-batch or not by its place among those that a stage holds, which a dry run of single ones "
    "does not show, so that the memory of groups is not known"
)
_UNCOUNTED = "keeps activations where they are not counted, so that the memory of groups is not known"
_WITH_TUNING: Mapping[str, str] = {
    "rampup_batch_size": _RESIZED,
    "step_batch_size_schedule": _RESIZED,
    "num_microbatches_with_partial_activation_checkpoints": _BY_PLACE,
    "fp8": _UNCOUNTED,
    "fp4": _UNCOUNTED,
    "cpu_offloading": _UNCOUNTED,
    "distribute_saved_activations": _UNCOUNTED,
    "external_cuda_graph": _UNCOUNTED,
    "cuda_graph_impl": _UNCOUNTED,
    "delay_wgrad_compute": _UNCOUNTED,
    "defer_embedding_wgrad_compute": _UNCOUNTED,
    "tensor_parallel_num_weight_shards": f"keeps gathered weights where they are not counted, {_UNKNOWN}",
    "use_precision_aware_optimizer": "keeps optimizer states in types of its own, whose memory is not known",
    "use_torch_fsdp2": f"gathers and frees parameters, {_UNKNOWN}",
    "hybrid_context_parallel": "has a scheduler of Megatron's own, which chooses the micro-batches of every batch",
    "perform_rl_step": "packs what was sampled into another number of micro-batches in every batch",
    "check_for_spiky_loss": "compares losses with the largest so far, a dry run's too",
    "te_rng_tracker": "draws random numbers that a dry run cannot put back",
    "export_kd_teacher_load": "gives micro-batches shapes of its own",
    "rerun_mode=report_determinism_stats": "compares iterations call by call, and a dry run comes before the first",
}
_WITH_SEARCH: Mapping[str, str] = {
    "num_microbatches_with_partial_activation_checkpoints": (
        "recomputes a micro-batch or not by its place among those that a stage holds, so that what is saved depends on "
        "the order"
    ),
    "distribute_saved_activations": "keeps activations where they are not counted",
}
_PACKS: Final = ("sft", "dataloader_inter_document_masking")
_LOGGED = "has losses in the log that Megatron divides by its own number of micro-batches"
_ONE_SIZE: Mapping[str, str] = {
    "tp_comm_overlap": "has buffers of one micro-batch size",
    "logits_load_dir": "reads a file for each micro-batch",
    "mtp_num_layers": _LOGGED,
    "dsa_indexer_loss_coeff": _LOGGED,
    "moe_z_loss_coeff": _LOGGED,
    "moe_expert_capacity_factor": "drops tokens by how many a micro-batch has",
    "variable_seq_lengths": "gives micro-batches lengths of their own, so that samples of two cannot be joined",
    **dict.fromkeys(_PACKS, "packs sequences into rows, which Megatron takes as the loader makes them"),
}


def refused_with_tuning(args: Any) -> Iterator[Refusal]:
    """Return a refusal for each of Megatron's arguments that does not go together with --group-size auto."""
    return refusals_of(args, _WITH_TUNING, "leave it out, or give --group-size a number")


def refused_with_search(args: Any) -> Iterator[Refusal]:
    """Return a refusal for each of Megatron's arguments that does not go together with a searched schedule."""
    return refusals_of(args, _WITH_SEARCH, "leave it out, or use another schedule")


#: What the setting is called, and has to be, where Transformer Engine captures: until 0.14, and since.
_CAPTURING: Final = (("external_cuda_graph", True), ("cuda_graph_impl", "transformer_engine"))


def captures(settings: Any) -> str | None:
    """Return the setting by which Transformer Engine captures CUDA graphs; None where it captures none."""
    return next((name for name, value in _CAPTURING if getattr(settings, name, None) == value), None)


def overlaps(settings: Any) -> bool:
    """Return whether forwards and backwards are computed together (`--overlap-moe-expert-parallel-comm`)."""
    return bool(getattr(settings, "overlap_moe_expert_parallel_comm", False))


def packs(args: Any) -> bool:
    """Return whether micro-batches are of sequences packed together, which Megatron's arguments ask for."""
    return any(getattr(args, setting, None) for setting in _PACKS)


def why_one_size(args: Any) -> str | None:
    """Return why micro-batches have to stay of --micro-batch-size samples; None where their data decide."""
    for setting, reason in _ONE_SIZE.items():
        if getattr(args, setting, None):
            return f"--{setting.replace('_', '-')} {reason}"
    if getattr(args, "num_experts", None) and getattr(args, "moe_router_load_balancing_type", None) != "none":
        return "--num-experts has a loss of its own for each micro-batch"
    if getattr(args, "eod_mask_loss", False) and not args.calculate_per_token_loss:
        return "--eod-mask-loss makes micro-batches count different numbers of tokens: add --calculate-per-token-loss"
    return None


def refused_in_a_v(args: Namespace) -> Iterator[Refusal]:
    """Yield a refusal for each of Megatron's arguments that does not go together with chunks in a V."""
    yield from refusals_of(args, _FILES_IN_A_V, "use torch_dist")
    yield from refusals_of(args, _IN_A_V, "leave it out, or use 1f1b")


def unlike_a_v(args: Namespace) -> Iterator[str]:
    """Yield a line for each of Megatron's arguments that a V cannot have in this release, or with this layout."""
    if getattr(args, "decoupled_lr", None) is not None and MEGATRON_CORE.series(RELEASES) in _LAST_STAGE_LOGS_IT:
        yield (
            "--decoupled-lr is logged by the last stage in this release, which has neither the embedding nor the "
            "output layer in a V: leave it out, or use megatron-core 0.16 or newer"
        )
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if layout is not None and "m" in str(layout).replace(",", "").rpartition("|")[0]:
        yield (
            f"--pipeline-model-parallel-layout {layout} has multi-token prediction apart from the loss; in a V both "
            "are in the last part: put m before L"
        )


def refused_settings(settings: Any, bpipe: bool, halves: bool = False, swaps: bool = False) -> Iterator[Refusal]:
    """Yield a refusal for each of the `settings` that does not go together with EvenPipe's schedules.

    With `bpipe` and `swaps` this includes BPipe and swaps, with `halves` backwards in halves. `settings` is Megatron's
    model configuration, or its arguments, whose attributes have the same names.
    """
    yield from refusals_of(settings, _ALWAYS, "turn it off, or EvenPipe's schedule")
    if bpipe or swaps:
        ours = " and ".join(["BPipe"] * bpipe + ["swaps"] * swaps)
        yield from refusals_of(settings, _MOVING, f"turn it off, or {ours}")
        if _captures_whole_layers(settings):
            remedy = f"capture parts of layers alone (--cuda-graph-scope attn moe_router), or turn it or {ours} off"
            yield from refusals_of(settings, _WHOLE_LAYERS_MOVING, remedy)
    if swaps:
        yield from refusals_of(settings, _SWAPPING, "turn it off, or swaps")
    if halves:
        yield from refusals_of(settings, _WITH_HALVES, "turn it off, or use 1f1b")


def _captures_whole_layers(settings: Any) -> bool:
    """Return whether CUDA graphs, if any, are of whole layers: the scope (since 0.18, modules) is "full", or empty, or
    has both halves of a layer.
    """
    scope = getattr(settings, "cuda_graph_modules", None) or getattr(settings, "cuda_graph_scope", None) or "full"
    named = scope.split(",") if isinstance(scope, str) else scope if isinstance(scope, list | tuple) else [scope]
    parts = {getattr(one, "name", one) for one in named}
    experts = getattr(settings, "num_moe_experts", None) or getattr(settings, "num_experts", None)
    return "full" in parts or {"attn", "moe" if experts else "mlp"} <= parts


def refusals_of(settings: Any, reasons: Mapping[str, str], remedy: str) -> Iterator[Refusal]:
    """Yield a refusal for each setting in `reasons` whose value is refused.

    A row "setting=value" refuses that value alone. Any other row refuses the values that `_REFUSED_AT` names or,
    without an entry there, a setting that is on.
    """
    for row, reason in reasons.items():
        setting, _, only = row.partition("=")
        value, refused_at = getattr(settings, setting, None), _REFUSED_AT.get(setting)
        if only or refused_at is None:
            if value == only if only else value:
                yield Refusal(setting, only, reason, remedy)
        elif refused_at(value, settings):
            values = value if isinstance(value, list | tuple) else [value]
            yield Refusal(setting, " ".join(map(str, values)), reason, remedy)


def refuse_unsupported(
    config: Any, bpipe: bool, model: Sequence[Any], records: bool, halves: bool = False, swaps: bool = False
) -> None:
    """Raise ValueError with one line that names the setting, why it does not go together, and what to do.

    `model` are the chunks of this stage; `records`: what autograd saves is recorded, to be moved or measured.
    """
    for refusal in refused_settings(config, bpipe, halves, swaps):
        raise ValueError(str(refusal))
    if any(getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False) for chunk in model):
        raise ValueError(f"use_megatron_fsdp {_FSDP}: turn it off, or EvenPipe's schedule")
    from evenpipe.upstream.saved_leaves import keeps_identity  # torch's; the rules above are read without it

    if records and not keeps_identity():
        raise ValueError(
            "activations are recorded under EvenPipe's patches only, or gradients would be lost: apply "
            "in_place_of_megatron(schedule), or turn BPipe, swaps and measure off"
        )
