"""Megatron settings under which EvenPipe's schedules cannot keep their promises, refused by name."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from evenpipe.upstream.saved_leaves import keeps_identity

__all__ = [
    "Refusal",
    "refuse_unsupported",
    "refused_arguments",
    "refused_settings",
    "refused_with_tuning",
    "refused_with_two_versions",
    "why_one_size",
]


class Refusal(NamedTuple):
    """A setting, its value where that matters ("=local"), why it does not go together with EvenPipe, what to do.

    A release that has no setting of a name does not have what it would do.
    """

    setting: str
    value: str
    reason: str
    remedy: str


_FSDP = "gathers and frees parameters, which would be taken for activations"
_ALWAYS: Mapping[str, str] = {
    "overlap_moe_expert_parallel_comm": "fuses forwards and backwards of different micro-batches",
    "use_megatron_fsdp": _FSDP,
    "use_custom_fsdp": _FSDP,
    "enable_cuda_graph": "captures Megatron's own order of micro-batches",
    "fine_grained_activation_offloading": "is started anew after each batch by Megatron's own schedules only",
    "moe_paged_stash": "is started anew before each batch by Megatron's own schedules only",
}
_WITH_BPIPE: Mapping[str, str] = {
    "cpu_offloading": "already moves the activations that BPipe would move",
    "num_microbatches_with_partial_activation_checkpoints": "makes micro-batches differ in what they save",
    "distribute_saved_activations": "keeps saved activations where BPipe cannot see them",
    "external_cuda_graph": "keeps saved activations in memory of its own, which BPipe cannot move",
}

_ONE_VERSION = "keeps something of the weights beside them, which would be one version's only"
_ADDRESSES = "captures the addresses of one weight version"
_JOINS = "joins all stages in every iteration, which 2bw is there to avoid"
_WITH_TWO_VERSIONS: Mapping[str, str] = {
    "overlap_param_gather": "gathers the newest weights in a forward that has to run on the ones before",
    "overlap_param_gather_with_optimizer_step": "gathers weights while a batch still runs on the ones before",
    "moe_router_enable_expert_bias": "changes routing after a batch, when stages compute the next one",
    "fp8": _ONE_VERSION,
    "fp4": _ONE_VERSION,
    "use_precision_aware_optimizer": _ONE_VERSION,
    "optimizer_cpu_offload": _ONE_VERSION,
    "nccl_ub": "registers the memory of one weight version",
    "external_cuda_graph": _ADDRESSES,
    "optimizer_cuda_graph": _ADDRESSES,
    "calculate_per_token_loss": "divides gradients by what all stages have counted of the batch",
    "reuse_grad_buf_for_mxfp8_param_ag": "keeps weights where gradients still wait for their step",
    "delay_wgrad_compute": "computes gradients after their batch",
    "defer_embedding_wgrad_compute": "computes the embedding's gradients when the pipeline is empty",
    "mtp_num_layers": _JOINS,
    "has_cond_embedder": _JOINS,
    "ddp_param_name_patterns_for_fp32_local_accumulation": "keeps gradients outside of the gradient buffer",
    "param_name_patterns_for_fp32_local_accumulation": "keeps gradients outside of the gradient buffer",
    "qk_clip": "changes weights before the step, which 2bw finishes in the next iteration",
    "hybrid_context_parallel": "makes micro-batches of their own shapes",
}
_BETWEEN: Final = "reads or changes gradients or weights before the step, which 2bw finishes in the next iteration"

_ARGUMENTS_WITH_TWO_VERSIONS: Mapping[str, str] = {
    "use_torch_fsdp2": "gathers and frees parameters, of which 2bw needs two versions",
    "timing_log_level": _JOINS,
    "log_energy": "joins all stages at each log",
    "log_straggler": "joins all stages at each log",
    "adlr_autoresume": "joins all stages to ask whether to stop: use --exit-signal-handler",
    "train_sync_interval": "waits for what a stage is yet to receive",
    "log_params_norm": _JOINS,
    "check_weight_hash_across_dp_replicas_interval": _BETWEEN,
    "save_wgrads_interval": _BETWEEN,
    "save_dgrads_interval": _BETWEEN,
    "save_params_interval": _BETWEEN,
    "save_activations_interval": _BETWEEN,
    "log_max_attention_logit": _JOINS,
    "perform_rl_step": "makes each batch with the weights of the one before",
    "iterations_to_skip": "skips data that 2bw has begun to read",
    "dataloader_save": "saves how far data has been read, and 2bw reads ahead",
}
_AMID = "while partners are amid transfers"
_ARGUMENTS_WITH_BPIPE_TOO: Mapping[str, str] = {
    "async_save": f"asks all ranks in every iteration whether it is done, {_AMID}",
    "distributed_timeout_seconds_after_init": f"waits for the whole device after the first iteration, {_AMID}",
    "empty_unused_memory_level": f"waits for the whole device in every iteration, {_AMID}",
}
_OPTIMIZERS: Final = ("adam", "sgd")

_UNSHARDED = ("num_distributed_optimizer_instances", "gtp_weight_remat_size")


_DIFFER = "makes micro-batches differ in what they save, so that the memory of groups is not known"
_UNCOUNTED = "keeps activations where they are not counted, so that the memory of groups is not known"
_PACKED = "packs sequences into micro-batches that cannot be cut by samples"
_COUNTED = "counts tokens, of a rehearsal too"
_LOGGED = "keeps figures of losses, of a rehearsal's too"
_RESIZED = "changes the samples of a batch, which are shared out among micro-batches once"
_WITH_TUNING: Mapping[str, str] = {
    "rampup_batch_size": _RESIZED,
    "step_batch_size_schedule": _RESIZED,
    "moe_router_enable_expert_bias": _COUNTED,
    "variable_seq_lengths": _DIFFER,
    "num_microbatches_with_partial_activation_checkpoints": _DIFFER,
    "fp8": _UNCOUNTED,
    "fp4": _UNCOUNTED,
    "cpu_offloading": _UNCOUNTED,
    "distribute_saved_activations": _UNCOUNTED,
    "external_cuda_graph": _UNCOUNTED,
    "delay_wgrad_compute": _UNCOUNTED,
    "defer_embedding_wgrad_compute": _UNCOUNTED,
    "use_precision_aware_optimizer": "keeps optimizer states in types of its own, whose memory is not known",
    "use_torch_fsdp2": "gathers and frees parameters, so that the memory of a stage is not known",
    "sft": _PACKED,
    "dataloader_inter_document_masking": _PACKED,
    "hybrid_context_parallel": _PACKED,
    "perform_rl_step": _PACKED,
    "mtp_num_layers": _LOGGED,
    "dsa_indexer_loss_coeff": _LOGGED,
    "check_for_spiky_loss": _LOGGED,
    "te_rng_tracker": "draws random numbers that a rehearsal cannot put back",
    "export_kd_teacher_load": "gives micro-batches shapes of its own",
}
_ONE_SIZE: Mapping[str, str] = {
    "tp_comm_overlap": "has buffers of one micro-batch size",
    "logits_load_dir": "reads a file for each micro-batch",
}


def refused_with_tuning(args: Any) -> Iterator[Refusal]:
    """What in Megatron's arguments does not go together with --group-size auto."""
    remedy = "leave it out, or give --group-size a number"
    yield from _given(args, _WITH_TUNING, remedy)
    if (getattr(args, "gtp_weight_remat_size", None) or 1) > 1:
        shards = args.tensor_parallel_num_weight_shards
        gathered = "keeps gathered weights where they are not counted, so that the memory of a stage is not known"
        yield Refusal("tensor_parallel_num_weight_shards", f" {shards}", gathered, remedy)
    yield from _counts_batches(args, _COUNTED, remedy)
    yield from _captured(args, _UNCOUNTED, remedy)
    if (mode := getattr(args, "rerun_mode", None)) == "report_determinism_stats":
        yield Refusal("rerun_mode", f" {mode}", "compares iterations call by call, and the first is rehearsed", remedy)


def why_one_size(args: Any) -> str | None:
    """Why micro-batches have to stay of --micro-batch-size samples; None where their data decide."""
    for setting, reason in _ONE_SIZE.items():
        if getattr(args, setting, None):
            return f"--{setting.replace('_', '-')} {reason}"
    if getattr(args, "num_experts", None) and getattr(args, "moe_router_load_balancing_type", None) != "none":
        return "--num-experts has a loss of its own for each micro-batch"
    if getattr(args, "eod_mask_loss", False) and not args.calculate_per_token_loss:
        return "--eod-mask-loss makes micro-batches count different numbers of tokens: add --calculate-per-token-loss"
    return None


def refused_with_two_versions(
    settings: Any, remedy: str = "leave it out, or use another schedule"
) -> Iterator[Refusal]:
    """What in `settings`, of Megatron's model, data parallelism or optimizer, does not go together with 2BW.

    `settings` are a configuration, or Megatron's arguments.
    """
    yield from _given(settings, _WITH_TWO_VERSIONS, remedy)
    for setting in _UNSHARDED:
        if (value := getattr(settings, setting, None) or 1) > 1:
            yield Refusal(setting, f" {value}", "shards weights beyond data-parallel replicas", remedy)
    if (ranks := getattr(settings, "expert_model_parallel_size", None) or 1) > 1:
        yield Refusal(
            "expert_model_parallel_size", f" {ranks}", "sums gradients of experts in groups of their own", remedy
        )
    yield from _counts_batches(settings, "counts the tokens of a whole batch, when stages compute the next one", remedy)
    yield from _captured(settings, _ADDRESSES, remedy)
    if math.isfinite(threshold := getattr(settings, "grad_norm_skip_threshold", None) or math.inf):
        yield Refusal(
            "grad_norm_skip_threshold", f" {threshold}", "skips steps in a way that 2bw does not know", remedy
        )


def refused_arguments(args: Namespace, bpipe: bool) -> Iterator[Refusal]:
    """What in Megatron's arguments does not go together with 2BW, or with BPipe on it."""
    remedy = "leave it out, or use --evenpipe-schedule 1f1b"
    if bpipe:
        yield from _given(args, _ARGUMENTS_WITH_BPIPE_TOO, "leave it, or --bpipe, out")
    yield from refused_with_two_versions(args, remedy)
    yield from _given(args, _ARGUMENTS_WITH_TWO_VERSIONS, remedy)
    if args.optimizer not in _OPTIMIZERS:
        yield Refusal("optimizer", f" {args.optimizer}", f"is none of {', '.join(_OPTIMIZERS)}", remedy)
    if args.vision_pretraining and args.vision_pretraining_type == "dino":
        yield Refusal("vision_pretraining_type", " dino", _BETWEEN, remedy)
    if getattr(args, "non_persistent_ckpt_type", None) == "local":
        yield Refusal("non_persistent_ckpt_type", " local", "has no room for a second weight version", remedy)


def refused_settings(settings: Any, bpipe: bool) -> Iterator[Refusal]:
    """What in `settings` does not go together with EvenPipe's schedules, or with BPipe if that is on.

    `settings` is Megatron's model configuration, or its arguments, whose attributes have the same names.
    """
    yield from _given(settings, _ALWAYS, "turn it off, or EvenPipe's schedule")
    captured_by = getattr(settings, "cuda_graph_impl", "none")
    if captured_by in ("local", "full_iteration"):
        order = "captures Megatron's own order of micro-batches"
        yield Refusal("cuda_graph_impl", f"={captured_by}", order, "set it to none")
    group, stages = getattr(settings, "microbatch_group_size_per_vp_stage", None), settings.pipeline_model_parallel_size
    if settings.virtual_pipeline_model_parallel_size is not None and group not in (None, stages):
        yield Refusal(
            "microbatch_group_size_per_vp_stage",
            f"={group}",
            f"is not the groups of pipeline_model_parallel_size={stages} micro-batches that EvenPipe interleaves",
            "leave it unset",
        )
    if not bpipe:
        return
    yield from _given(settings, _WITH_BPIPE, "turn it off, or BPipe")
    if captured_by == "transformer_engine":
        yield Refusal(
            "cuda_graph_impl",
            "=transformer_engine",
            "keeps saved activations in memory of its own, which BPipe cannot move",
            "set it to none, or turn BPipe off",
        )


def _given(settings: Any, reasons: Mapping[str, str], remedy: str) -> Iterator[Refusal]:
    """Those of the settings with `reasons` that are there, and neither off nor zero."""
    for setting, reason in reasons.items():
        if getattr(settings, setting, None):
            yield Refusal(setting, "", reason, remedy)


def _counts_batches(settings: Any, reason: str, remedy: str) -> Iterator[Refusal]:
    if "global_aux_loss" in (balancing := getattr(settings, "moe_router_load_balancing_type", None) or ()):
        kinds = balancing if isinstance(balancing, str) else " ".join(balancing)
        yield Refusal("moe_router_load_balancing_type", f" {kinds}", reason, remedy)


def _captured(settings: Any, reason: str, remedy: str) -> Iterator[Refusal]:
    if (captured := getattr(settings, "cuda_graph_impl", None)) not in (None, "none"):
        yield Refusal("cuda_graph_impl", f" {captured}", reason, remedy)


def refuse_unsupported(config: Any, bpipe: bool, model: Sequence[Any], records: bool) -> None:
    """Raise ValueError with one line that names the setting, why it does not go together, and what to do.

    `model` are the chunks of this stage; `records`: what autograd saves is recorded, for BPipe or to be measured.
    """
    for setting, value, reason, remedy in refused_settings(config, bpipe):
        raise ValueError(f"{setting}{value} {reason}: {remedy}")
    if any(getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False) for chunk in model):
        raise ValueError(f"use_megatron_fsdp {_FSDP}: turn it off, or EvenPipe's schedule")
    if records and not keeps_identity():
        raise ValueError(
            "activations are recorded under EvenPipe's patches only, or gradients would be lost: apply "
            "in_place_of_megatron(schedule), or turn BPipe and measure off"
        )
