"""Megatron settings under which EvenPipe's schedules cannot keep their promises, refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["refuse_unsupported"]


def refuse_unsupported(config: Any, bpipe: bool, model: Sequence[Any], records: bool) -> None:
    """Raise ValueError with one line that names the setting, why it does not go together, and what to do.

    `model` are the chunks of this stage; `records`: what autograd saves is recorded, for BPipe or to be measured.
    """
    chunks = len(model)
    always = {
        "overlap_moe_expert_parallel_comm": "fuses forwards and backwards of different micro-batches",
        "variable_seq_lengths": "hides the shape of what is received, which EvenPipe posts ahead",
        "enable_cuda_graph": "captures Megatron's own order of micro-batches",
        "fine_grained_activation_offloading": "is started anew after each batch by Megatron's own schedules only",
    }
    with_bpipe = {
        "cpu_offloading": "already moves the activations that BPipe would move",
        "num_microbatches_with_partial_activation_checkpoints": "makes micro-batches differ in what they save",
        "distribute_saved_activations": "keeps saved activations where BPipe cannot see them",
        "external_cuda_graph": "keeps saved activations in memory of its own, which BPipe cannot move",
    }
    for setting, reason in always.items():
        if getattr(config, setting, False):
            raise ValueError(f"{setting} {reason}: turn it off, or EvenPipe's schedule")
    captured_by = getattr(config, "cuda_graph_impl", "none")
    if captured_by == "local":
        raise ValueError("cuda_graph_impl=local captures Megatron's own order of micro-batches: set it to none")
    for setting, reason in with_bpipe.items():
        if bpipe and getattr(config, setting, None):
            raise ValueError(f"{setting} {reason}: turn it off, or BPipe")
    if bpipe and captured_by == "transformer_engine":
        raise ValueError(
            "cuda_graph_impl=transformer_engine keeps saved activations in memory of its own, which BPipe cannot move: "
            "set it to none, or turn BPipe off"
        )
    if bpipe and getattr(config, "num_moe_experts", None) and not config.moe_pad_expert_input_to_capacity:
        raise ValueError(
            "num_moe_experts makes micro-batches differ in what they save: set moe_pad_expert_input_to_capacity, or "
            "turn BPipe off"
        )
    overlaps = any(getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False) for chunk in model)
    if records and overlaps and config.gradient_accumulation_fusion:
        # Autograd hands a recorded weight back without the attributes by which the fused kernel tells that it has
        # added its gradient, and the reduction then takes the gradient for missing.
        raise ValueError(
            "gradient_accumulation_fusion with overlap_grad_reduce cannot be recorded: turn one of them off, or "
            "BPipe and measure"
        )
    group = getattr(config, "microbatch_group_size_per_vp_stage", None)
    if chunks > 1 and group not in (None, config.pipeline_model_parallel_size):
        raise ValueError(
            f"microbatch_group_size_per_vp_stage={group}: EvenPipe interleaves groups of "
            f"pipeline_model_parallel_size={config.pipeline_model_parallel_size} micro-batches; leave it unset"
        )
