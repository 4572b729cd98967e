"""The run that Megatron's arguments describe."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NamedTuple

from evenpipe.planner.arguments.values import FlagError, Values
from evenpipe.planner.run import Attention, Run

__all__ = ["Pipelined", "run_of"]


class Pipelined(NamedTuple):
    """What EvenPipe is asked for: ``schedule``, or None for Megatron's own, BPipe, and micro-batches in a row."""

    schedule: str | None = None
    bpipe: bool = False
    group_size: int = 1


def run_of(args: Namespace, pipelined: Pipelined, layout: Sequence[Sequence[str]] | None = None) -> Run:
    """From arguments that Megatron has validated. ``layout``: the kinds of layers of each part, by name, if given.

    With EvenPipe's schedules hand-overs travel beside compute, with Megatron's own as `--overlap-p2p-communication`
    has it.
    """
    value = Values(args)
    stages, chunks = value("pipeline_model_parallel_size", 1), value("virtual_pipeline_model_parallel_size", None) or 1
    in_groups = value("microbatch_group_size_per_vp_stage", None) if chunks > 1 else None
    ours = pipelined.schedule is not None or pipelined.bpipe
    waits = () if ours else ("1f1b",) if value("overlap_p2p_comm", False) else ("1f1b", "interleaved")
    further = [n for n, kinds in enumerate(layout or ()) if "mtp" in kinds]
    precision: Any = value.precision
    recompute: Any = value.recompute or "none"
    return Run(
        global_batch=value.needed("global_batch_size"),
        tensor=value("tensor_model_parallel_size", 1),
        stages=stages,
        data=value("data_parallel_size", 1),
        context=value("context_parallel_size", 1),
        expert=value("expert_model_parallel_size", 1),
        expert_tensor=value("expert_tensor_parallel_size", None),
        chunks=chunks,
        micro_batch=value("micro_batch_size", 1),
        recompute=recompute,
        recomputed_layers=_recomputed_layers(value),
        schedule=pipelined.schedule or ("interleaved" if chunks > 1 else "1f1b"),
        bpipe=pipelined.bpipe,
        group_size=pipelined.group_size if in_groups in (None, stages) else in_groups,
        layout=_by_hand(value, stages * chunks)
        if layout is None
        else tuple(kinds.count("decoder") for kinds in layout),
        further_part=further[0] if further else None,
        precision=precision,
        attention=_attention(value),
        sequence_parallel=bool(value("sequence_parallel", False)),
        sharded_optimizer=bool(value("use_distributed_optimizer", False)),
        gradients_in_fp32=bool(value("accumulate_allreduce_grads_in_fp32", False)),
        overlap_collectives=bool(value("async_tensor_model_parallel_allreduce", True)),
        overlap_gradients=bool(value("overlap_grad_reduce", False)),
        overlap_parameters=bool(value("overlap_param_gather", False)),
        fused_softmax=bool(value("masked_softmax_fusion", True)),
        blocking=waits,
        placement="pipeline" if value("use_tp_pp_dp_mapping", False) else "replicas",
    )


def _attention(value: Values) -> Attention:
    """Transformer Engine takes a fused kernel unless it is told not to; Megatron's own layers only if told to."""
    backend = getattr(value("attention_backend", None), "name", value("attention_backend", "auto"))
    if value("use_flash_attn", False) or backend in ("flash", "fused"):
        return "flash"
    local = value("transformer_impl", "transformer_engine") == "local"
    return "unfused" if local or backend in ("unfused", "local") or value.precision == "fp32" else "flash"


def _recomputed_layers(value: Values) -> int | None:
    """`--recompute-method block` carries out so many of each part's layers again, and keeps all of the others."""
    if value.recompute != "full" or value("recompute_method", "uniform") != "block":
        return None
    return int(value("recompute_num_layers", 1))


def _by_hand(value: Values, parts: int) -> tuple[int, ...] | None:
    """Layers of each part by the flags that set the first and last stage's apart; None where all have as many."""
    layers = value.needed("num_layers")
    first, last = (value(f"decoder_{end}_pipeline_num_layers", None) for end in ("first", "last"))
    if first is not None or last is not None:
        return _ends_apart(layers, parts // value("pipeline_model_parallel_size", 1), parts, first, last)
    ends = [bool(value(f"account_for_{end}_in_pipeline_split", False)) for end in ("embedding", "loss")]
    if not any(ends):
        return None
    each = (layers + sum(ends)) // parts
    return (each - ends[0], *(each,) * (parts - 2), each - ends[1])


def _ends_apart(layers: int, chunks: int, parts: int, first: int | None, last: int | None) -> tuple[int, ...]:
    """The layers that are left are shared out evenly; a stage's own among its chunks."""
    stages = parts // chunks
    middle = stages - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    if (middle and left % middle) or left < 0 or (not middle and left):
        raise FlagError(
            f"--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers: {left} layers do not divide "
            f"among the other {middle} stages: choose other numbers"
        )
    each = [first, *[None] * (stages - 2), last]
    own = [left // middle if layers is None else layers for layers in each]
    if any(one % chunks for one in own):
        raise FlagError(f"--decoder-first-pipeline-num-layers: {own} layers do not divide into {chunks} model chunks")
    return tuple(one // chunks for one in own) * chunks
