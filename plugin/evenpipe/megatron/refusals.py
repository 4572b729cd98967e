"""Megatron settings under which EvenPipe's schedules cannot keep their promises, refused by name."""

from __future__ import annotations

from typing import Any

__all__ = ["refuse_unsupported"]


def refuse_unsupported(config: Any, bpipe: bool, chunks: int) -> None:
    """Raise ValueError with one line that names the setting, why it does not go together, and what to do."""
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
    group = getattr(config, "microbatch_group_size_per_vp_stage", None)
    if chunks > 1 and group not in (None, config.pipeline_model_parallel_size):
        raise ValueError(
            f"microbatch_group_size_per_vp_stage={group}: EvenPipe interleaves groups of "
            f"pipeline_model_parallel_size={config.pipeline_model_parallel_size} micro-batches; leave it unset"
        )
