"""Megatron's arguments under which kFkB cannot be tuned, or only with one micro-batch size, and why."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

from evenpipe.megatron.refusals import Refusal

__all__ = ["refused_arguments", "why_one_size"]

_REMEDY: Final = "leave it out, or give --group-size a number"
_DIFFER: Final = "makes micro-batches differ in what they save, so that the memory of groups is not known"
_UNCOUNTED: Final = "keeps activations where they are not counted, so that the memory of groups is not known"
_PACKED: Final = "packs sequences into micro-batches that cannot be cut by samples"
_LOGGED: Final = "keeps figures of losses, of a rehearsal's too"
_RESIZED: Final = "changes the samples of a batch, which are shared out among micro-batches once"

_REFUSED = MappingProxyType(
    {
        "rampup_batch_size": _RESIZED,
        "step_batch_size_schedule": _RESIZED,
        "num_experts": _DIFFER,
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
)
_ONE_SIZE = MappingProxyType(
    {
        "tp_comm_overlap": "has buffers of one micro-batch size",
        "logits_load_dir": "reads a file for each micro-batch",
    }
)


def refused_arguments(args: Namespace) -> Iterator[Refusal]:
    """What in Megatron's arguments does not go together with --group-size auto.

    A release that has no argument of a name does not have what it would do.
    """
    for setting, reason in _REFUSED.items():
        if getattr(args, setting, None):
            yield Refusal(setting, "", reason, _REMEDY)
    # Experts, which have shards of their own, are refused above.
    if (getattr(args, "gtp_weight_remat_size", None) or 1) > 1:
        shards = args.tensor_parallel_num_weight_shards
        gathered = "keeps gathered weights where they are not counted, so that the memory of a stage is not known"
        yield Refusal("tensor_parallel_num_weight_shards", f" {shards}", gathered, _REMEDY)
    if (captured := getattr(args, "cuda_graph_impl", None)) not in (None, "none"):
        yield Refusal("cuda_graph_impl", f" {captured}", _UNCOUNTED, _REMEDY)
    if (mode := getattr(args, "rerun_mode", None)) == "report_determinism_stats":
        yield Refusal("rerun_mode", f" {mode}", "compares iterations call by call, and the first is rehearsed", _REMEDY)


def why_one_size(args: Namespace) -> str | None:
    """Why micro-batches have to stay of --micro-batch-size samples; None where their data decide."""
    for setting, reason in _ONE_SIZE.items():
        if getattr(args, setting, None):
            return f"--{setting.replace('_', '-')} {reason}"
    if getattr(args, "eod_mask_loss", False) and not args.calculate_per_token_loss:
        return "--eod-mask-loss makes micro-batches count different numbers of tokens: add --calculate-per-token-loss"
    return None
