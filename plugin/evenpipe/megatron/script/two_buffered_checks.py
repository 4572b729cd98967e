"""Megatron's arguments that 2BW cannot be had with, and why."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

from evenpipe.megatron.refusals import Refusal

__all__ = ["refused_with_two_versions"]

_REMEDY: Final = "leave it out, or use --evenpipe-schedule 1f1b"
_ONE_VERSION: Final = "keeps something of the weights beside them, which would be one version's only"
_BETWEEN: Final = "reads or changes gradients or weights before the step, which 2bw finishes in the next iteration"
_JOINS: Final = "joins all stages in every iteration, which 2bw is there to avoid"

_REFUSED = MappingProxyType(
    {
        "overlap_param_gather": "gathers the newest weights in a forward that has to run on the ones before",
        "overlap_param_gather_with_optimizer_step": "gathers weights while a batch still runs on the ones before",
        "use_torch_fsdp2": "gathers and frees parameters, of which 2bw needs two versions",
        "num_experts": "has losses and gradients of its own that wait for all stages",
        "fp8": _ONE_VERSION,
        "fp4": _ONE_VERSION,
        "use_precision_aware_optimizer": _ONE_VERSION,
        "optimizer_cpu_offload": _ONE_VERSION,
        "nccl_ub": "registers the memory of one weight version",
        "external_cuda_graph": "captures the addresses of one weight version",
        "optimizer_cuda_graph": "captures the addresses of one weight version",
        "calculate_per_token_loss": "divides gradients by what all stages have counted of the batch",
        "reuse_grad_buf_for_mxfp8_param_ag": "keeps weights where gradients still wait for their step",
        "delay_wgrad_compute": "computes gradients after their batch",
        "defer_embedding_wgrad_compute": "computes the embedding's gradients when the pipeline is empty",
        "mtp_num_layers": _JOINS,
        "timing_log_level": _JOINS,
        "log_straggler": "joins all stages at each log",
        "adlr_autoresume": "joins all stages to ask whether to stop: use --exit-signal-handler",
        "train_sync_interval": "waits for what a stage is yet to receive",
        "log_params_norm": _JOINS,
        "check_weight_hash_across_dp_replicas_interval": _BETWEEN,
        "save_wgrads_interval": _BETWEEN,
        "save_dgrads_interval": _BETWEEN,
        "save_params_interval": _BETWEEN,
        "save_activations_interval": _BETWEEN,
        "qk_clip": _BETWEEN,
        "log_max_attention_logit": _JOINS,
        "perform_rl_step": "makes each batch with the weights of the one before",
        "iterations_to_skip": "skips data that 2bw has begun to read",
        "dataloader_save": "saves how far data has been read, and 2bw reads ahead",
        "hybrid_context_parallel": "makes micro-batches of their own shapes",
    }
)
_ONE: Final = ("num_distributed_optimizer_instances", "gtp_weight_remat_size")
_OPTIMIZERS: Final = ("adam", "sgd")


def refused_with_two_versions(args: Namespace, bpipe: bool) -> Iterator[Refusal]:
    """What in Megatron's arguments does not go together with 2BW, or with BPipe on it.

    A release that has no argument of a name does not have what it would do.
    """
    if bpipe and args.async_save:
        reason = "asks all ranks in every iteration whether it is done, while partners are amid transfers"
        yield Refusal("async_save", "", reason, "leave it out, or use 2bw without --bpipe")
    for setting, reason in _REFUSED.items():
        if getattr(args, setting, None):
            yield Refusal(setting, "", reason, _REMEDY)
    for setting in _ONE:
        if (value := getattr(args, setting, None) or 1) > 1:
            yield Refusal(setting, f" {value}", "shards weights beyond data-parallel replicas", _REMEDY)
    if (captured := getattr(args, "cuda_graph_impl", None)) not in (None, "none"):
        yield Refusal("cuda_graph_impl", f" {captured}", "captures the addresses of one weight version", _REMEDY)
    if args.optimizer not in _OPTIMIZERS:
        yield Refusal("optimizer", f" {args.optimizer}", f"is none of {', '.join(_OPTIMIZERS)}", _REMEDY)
    if args.vision_pretraining and args.vision_pretraining_type == "dino":
        yield Refusal("vision_pretraining_type", " dino", _BETWEEN, _REMEDY)
    if getattr(args, "non_persistent_ckpt_type", None) == "local":
        yield Refusal("non_persistent_ckpt_type", " local", "has no room for a second weight version", _REMEDY)
