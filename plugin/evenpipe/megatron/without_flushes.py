"""Refuse Megatron's settings that do not go together with schedules without flushes (2bw, paci), in one line each."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any, Final

from evenpipe.megatron.unsupported import Refusal, refusals_of

__all__ = ["refused_arguments", "refused_without_flushes"]

_JOINS: Final = "joins all stages in every iteration, which schedules without flushes are there to avoid"
_OUTSIDE: Final = "keeps gradients outside of the gradient buffer"
_SHARDED: Final = "shards weights beyond data-parallel replicas"
_BOTH: Final[Mapping[str, str]] = {
    "delay_wgrad_compute": "computes gradients after their batch",
    "defer_embedding_wgrad_compute": "computes the embedding's gradients when the pipeline is empty",
    "dsa_indexer_loss_coeff": _JOINS,
    "has_cond_embedder": _JOINS,
    "ddp_param_name_patterns_for_fp32_local_accumulation": _OUTSIDE,
    "param_name_patterns_for_fp32_local_accumulation": _OUTSIDE,
    "hybrid_context_parallel": "makes micro-batches of their own shapes",
    "tensor_parallel_num_weight_shards": _SHARDED,
    "gtp_weight_remat_size": _SHARDED,
    "expert_tensor_parallel_num_weight_shards": _SHARDED,
    "expert_gtp_weight_remat_size": _SHARDED,
}

_QUANTISED: Final = "keeps weights in FP8 or FP4 alone, whose scales and transposes 2bw has no second version of"
_ADDRESSES: Final = "captures the addresses of one weight version"
_DELAYED: Final[Mapping[str, str]] = {
    "overlap_param_gather_with_optimizer_step": "gathers weights while a batch still runs on the ones before",
    "fp8_param": _QUANTISED,
    "fp8_param_gather": _QUANTISED,
    "fp4_param": _QUANTISED,
    "fp4_param_gather": _QUANTISED,
    "nccl_ub": "registers the memory of one weight version",
    "external_cuda_graph": _ADDRESSES,
    "optimizer_cuda_graph": _ADDRESSES,
    "cuda_graph_impl": _ADDRESSES,
    "reuse_grad_buf_for_mxfp8_param_ag": "keeps weights where gradients still wait for their step",
    "qk_clip": "changes weights after a step that 2bw has not made by then",
    "mtp_detach_heads": "clips multi-token prediction by a norm of its own, and 2bw clips all by one",
}

_BY_ALL: Final = ("clip_grad", "fp16", "loss_scale", "calculate_per_token_loss", "grad_norm_skip_threshold")
_WAITS: Final = (
    "decides a step by all stages' gradients, and under paci a stage steps before the stages ahead end the batch"
)
_GRAPHS: Final = "captures Megatron's own order of micro-batches"
_IN_PLACE: Final[Mapping[str, str]] = {
    **dict.fromkeys(_BY_ALL, _WAITS),
    **dict.fromkeys(("fp8", "fp4"), "keeps quantised copies of weights, which paci changes amid their micro-batches"),
    "external_cuda_graph": _GRAPHS,
    "cuda_graph_impl": _GRAPHS,
    "optimizer_cuda_graph": "captures a step between two batches, and paci's is within one",
    "qk_clip": "clips by the largest logits of a batch, and under paci some are the next batch's",
}
_NEEDED: Final[Mapping[str, str]] = {
    "untie_embeddings_and_output_weights": "ties a weight over stages, whose step waits for another stage's gradient",
}

_TWO_BATCHES: Final = "records the micro-batches that an iteration forwards, some of which are the next batch's"
_BOTH_OF_ARGUMENTS: Final[Mapping[str, str]] = {
    "adlr_autoresume": "joins all stages to ask whether to stop: use --exit-signal-handler",
    "save_wgrads_interval": "reads whole gradients of all replicas between batch and step, which are not there then",
    "save_dgrads_interval": _TWO_BATCHES,
    "save_activations_interval": _TWO_BATCHES,
    "save_tokens_per_expert_interval": _TWO_BATCHES,
    "moe_routing_trace_path": _TWO_BATCHES,
    "moe_expert_rank_capacity_factor": "runs a batch again where experts overflow, when the next one has begun",
    "vision_pretraining_type": "changes gradients before the step and weights after it, which is made at another time",
    "perform_rl_step": "makes each batch with the weights of the one before",
    "iterations_to_skip": "skips data of which some has been read ahead",
    "dataloader_save": "saves how far data has been read, which is ahead of training",
}
_DELAYED_ARGUMENTS: Final[Mapping[str, str]] = {
    "save_params_interval": "saves weights after a step that 2bw has not made by then",
    "non_persistent_ckpt_type=local": "has no room for a second weight version",
}

_AMID: Final = "while partners are amid transfers"
_WITH_BPIPE: Final[Mapping[str, str]] = {
    "async_save": f"asks all ranks in every iteration whether it is done, {_AMID}",
    "profile": f"waits for the whole device where it begins and ends, {_AMID}",
    "train_sync_interval": f"waits for the whole device at each interval, {_AMID}",
    "distributed_timeout_seconds_after_init": f"waits for the whole device after the first iteration, {_AMID}",
    "empty_unused_memory_level": f"waits for the whole device in every iteration, {_AMID}",
}

_REMEDY: Final = "leave it out, or use another schedule"
_PACI_REMEDY: Final = "turn it off, or use 2bw"


def refused_without_flushes(settings: Any, in_place: bool, remedy: str = _REMEDY) -> Iterator[Refusal]:
    """Yield a refusal for each of the `settings` that does not go together with 2bw or, `in_place`, with paci.

    `settings` are a configuration of Megatron's model, data parallelism or optimizer, or Megatron's arguments.
    """
    yield from refusals_of(settings, _BOTH, remedy)
    if in_place:
        yield from refusals_of(settings, _IN_PLACE, _PACI_REMEDY)
        yield from refusals_of(settings, _NEEDED, "add it, or use 2bw")
    else:
        yield from refusals_of(settings, _DELAYED, remedy)


def refused_arguments(args: Namespace, in_place: bool, bpipe: bool) -> Iterator[Refusal]:
    """Yield a refusal for each of Megatron's arguments that does not go together with 2bw or paci, or BPipe on them."""
    remedy = "leave it out, or use --evenpipe-schedule 1f1b"
    if bpipe:
        yield from refusals_of(args, _WITH_BPIPE, "leave it, or --bpipe, out")
    yield from refused_without_flushes(args, in_place, remedy)
    yield from refusals_of(args, _BOTH_OF_ARGUMENTS, remedy)
    if not in_place:
        yield from refusals_of(args, _DELAYED_ARGUMENTS, remedy)
