"""What can be changed of a run, one thing at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, get_args

from evenpipe.descriptions import Model
from evenpipe.fitting.weighing import Weighing
from evenpipe.planner.run import Module, OffloadModule, Run

__all__ = [
    "ASPECTS",
    "NARROWER",
    "SHORT",
    "Aspect",
    "alternatives",
    "changed",
    "modules_of",
    "offloadable",
    "with_aspect",
]

Aspect = Literal[
    "allocator",
    "optimizer",
    "overlap",
    "recompute",
    "micro-batch",
    "schedule",
    "layout",
    "context",
    "experts",
    "tensor",
    "pipeline",
    "placement",
    "gradients",
    "moments",
    "offload",
    "host",
]
#: By aspect, the fields of Run that it is of.
ASPECTS: Final[Mapping[Aspect, tuple[str, ...]]] = MappingProxyType(
    {
        "allocator": ("expandable_segments",),
        "optimizer": ("sharded_optimizer",),
        "overlap": ("overlap_gradients", "overlap_parameters"),
        "recompute": ("recompute", "recomputed_modules", "recomputed_layers"),
        "micro-batch": ("micro_batch",),
        "schedule": ("schedule", "bpipe", "group_size", "blocking"),
        "layout": ("chunks", "layout", "further_part"),
        "context": ("context",),
        "experts": ("expert", "expert_tensor"),
        "tensor": ("tensor", "sequence_parallel"),
        "pipeline": ("stages",),
        "placement": ("placement",),
        "gradients": ("gradients_in_fp32",),
        "moments": ("moment_bytes",),
        "offload": ("offload_modules", "offload_fraction", "offload_delta_bytes"),
        "host": ("optimizer_offload",),
    }
)
#: Names of aspects as papers and `evenpipe plan` have them.
SHORT: Final[Mapping[str, Aspect]] = MappingProxyType(
    {
        "t": "tensor",
        "p": "pipeline",
        "c": "context",
        "e": "experts",
        "b": "micro-batch",
        "v": "layout",
        **{name: name for name in get_args(Aspect)},
    }
)
#: Shares of what could wait on the host; less than all needs Megatron-LM 0.19.
_FRACTIONS: Final = (1.0, 0.5)
#: Aspects whose changes have sums or moments in fewer bits.
NARROWER: Final[frozenset[Aspect]] = frozenset(("gradients", "moments"))

Alternatives: TypeAlias = "Iterator[tuple[Aspect, Run]]"


def changed(old: Run, new: Run) -> frozenset[Aspect]:
    """Return what is different."""
    return frozenset(
        aspect for aspect, fields in ASPECTS.items() if any(getattr(old, one) != getattr(new, one) for one in fields)
    )


def with_aspect(run: Run, of: Run, aspect: Aspect, gpus: int) -> Run:
    """Return ``run`` with one aspect as ``of`` has it, and as many replicas as then fill the GPUs."""
    return _filled(replace(run, **{field: getattr(of, field) for field in ASPECTS[aspect]}), gpus)


def alternatives(
    weighing: Weighing,
    run: Run,
    modules: tuple[Module, ...],
    offloaded: tuple[OffloadModule, ...] = (),
    near: bool = True,
) -> Alternatives:
    """Yield runs that are different in one aspect each, most of which cannot be or do not fit.

    modules: what selective recomputation may carry out again; ``offloaded``: whose inputs may wait on the host.
    ``near``: sizes twice or half as large only.
    """
    model, gpus = weighing.model, weighing.cluster.gpus
    yield "allocator", replace(run, expandable_segments=True)
    yield "optimizer", replace(run, sharded_optimizer=True)
    yield "overlap", replace(run, overlap_gradients=True, overlap_parameters=bool(run.sharded_optimizer))
    yield from (("recompute", one) for one in _recomputing(model, run, modules))
    if run.precision == "bf16":
        yield "gradients", replace(run, gradients_in_fp32=False)
    if run.sharded_optimizer and run.precision != "fp32":
        yield "moments", replace(run, moment_bytes=2)
    if offloaded:
        yield "offload", replace(run, offload_modules=(), offload_fraction=1.0, offload_delta_bytes=0)
        for fraction in _FRACTIONS:
            yield "offload", replace(run, offload_modules=offloaded, offload_fraction=fraction)
    if run.sharded_optimizer and run.optimizer == "adam" and run.precision != "fp32":
        yield from (("host", replace(run, optimizer_offload=share)) for share in (0.0, *_FRACTIONS))
    for chunks in range(1, min(8, max(1, model.layers // run.stages)) + 1) if run.stages > 1 else ():
        yield "layout", weighing.balanced(_chunked(run, chunks))
    for size in _sizes(run.micro_batch, near):
        yield "micro-batch", replace(run, micro_batch=size)
    for size in _sizes(run.context, near):
        yield "context", _filled(replace(run, context=size), gpus)
    if model.experts is not None:
        for size in _sizes(run.expert, near):
            for ways in {None, 1} if run.tensor > 1 else {run.expert_tensor}:
                yield "experts", replace(run, expert=size, expert_tensor=ways)
    for size in _sizes(run.tensor, near):
        yield "tensor", _filled(replace(run, tensor=size, sequence_parallel=size > 1), gpus)
    if run.tensor > 1:
        yield "tensor", replace(run, sequence_parallel=True)
    for size in _sizes(run.stages, near):
        if size <= model.layers:
            yield "pipeline", weighing.balanced(_chunked(_filled(replace(run, stages=size), gpus), run.chunks))


def _filled(run: Run, gpus: int) -> Run:
    return replace(run, data=max(1, gpus // (run.tensor * run.context * run.stages)))


def _chunked(run: Run, chunks: int) -> Run:
    """Return the run with so many chunks a stage; Megatron's own schedule follows them."""
    chunks = 1 if run.stages == 1 else chunks
    if run.schedule not in ("1f1b", "interleaved"):
        return replace(run, chunks=chunks)
    return replace(run, chunks=chunks, schedule="interleaved" if chunks > 1 else "1f1b")


def _sizes(now: int, near: bool) -> Iterator[int]:
    yield from (now * 2, *([now // 2] if now % 2 == 0 else []))
    if not near:
        yield from (now * 4, *([now // 4] if now % 4 == 0 else []))


def modules_of(model: Model, run: Run, grouped: bool) -> tuple[Module, ...]:
    """Return the modules that selective recomputation can carry out again under Megatron's rules.

    grouped: experts' products are grouped, which moe_act asks for. FP8 layers' norms keep nothing, and delayed scaling
    recomputes no activation (`transformer_config.py`).
    """
    experts, dense = (
        model.experts is not None,
        model.experts is None or model.expert_layers(0, model.layers) < model.layers,
    )
    asked: Mapping[Module, bool] = {
        "core_attn": run.attention == "unfused",
        "layernorm": run.quantized is None,
        "moe_act": experts and grouped and run.quantized != "delayed" and not run.fused_experts,
        "mla_up_proj": model.latent is not None,
        "mlp": dense,
        "moe": experts,
        "shared_experts": experts and bool(model.experts and model.experts.shared_ffn),
    }
    return tuple(name for name, has in asked.items() if has)


def offloadable(model: Model, run: Run) -> tuple[OffloadModule, ...]:
    """Return the modules whose inputs Megatron can take to the host (``--offload-modules``), all that the model has."""
    attention: tuple[OffloadModule, ...] = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
    experts: tuple[OffloadModule, ...] = ("expert_fc1", "moe_act")
    return attention + (experts if model.experts is not None and not run.fused_experts else ())


def _recomputing(model: Model, run: Run, modules: tuple[Module, ...]) -> Iterator[Run]:
    """Nothing, every few of the modules, some layers of each part, or all layers."""
    run = replace(run, recomputed_layers=None, recomputed_modules=Run.recomputed_modules)
    yield replace(run, recompute="none")
    for number in range(1, min(3, len(modules)) + 1):
        for few in combinations(modules, number):
            if "moe" not in few or not {"moe_act", "shared_experts"} & set(few):
                yield replace(run, recompute="selective", recomputed_modules=few)
    whole = replace(run, recompute="full")
    yield whole
    most = max(run.layers_of(model)) if run.layout or model.layers % (run.stages * run.chunks) == 0 else 0
    yield from (replace(whole, recomputed_layers=layers) for layers in _some(most))


def _some(most: int) -> Iterator[int]:
    """Yield each number of layers below ``most``, of many about eight."""
    step = max(1, most // 8)
    yield from range(step, most, step)
