"""Megatron's flags of a run beside parallelism: FP8 and FP4, token dispatchers, CUDA graphs, what is recomputed."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, _ArgumentGroup
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations_with_replacement
from math import inf
from typing import Any, Final, get_args

from evenpipe.planner.run import Adapted, Graph, Module, OffloadModule, Optimizer, Run, Sharding
from evenpipe.schedule import DelayCorrection

__all__ = ["add_features", "features_of", "flags_of", "of_megatron_s_schedules"]

#: Fields of Run that a switch sets: what they mean is at Run.
_SWITCHES: Final = {
    "quantized_parameters": "fp8-param-gather",
    "quantized_attention": "fp8-dot-product-attention",
    "user_buffers": "tp-comm-overlap",
    "overlap_experts": "overlap-moe-expert-parallel-comm",
    "fused_experts": "use-transformer-engine-op-fuser",
}
_CORRECTION: Final = "evenpipe-delay-correction"
_CHOICES: Final = {
    "fp8-format": ("e4m3", "hybrid"),
    "fp8-recipe": ("delayed", "tensorwise", "blockwise", "mxfp8"),
    "fp4-format": ("e2m1",),
    "fp4-recipe": ("nvfp4",),
    "moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "moe-flex-dispatcher-backend": ("deepep", "hybridep"),
    "cuda-graph-impl": ("none", "local", "transformer_engine", "full_iteration"),
    "exp-avg-dtype": ("fp32", "fp16", "bf16", "fp8"),
    "exp-avg-sq-dtype": ("fp32", "fp16", "bf16", "fp8"),
    "data-parallel-sharding-strategy": get_args(Sharding),
    "optimizer": ("adam", "sgd", "muon", "dist_muon"),
    _CORRECTION: get_args(DelayCorrection),
}
_LISTS: Final = {
    "recompute-modules": get_args(Module),
    "cuda-graph-scope": get_args(Graph),
    "cuda-graph-modules": get_args(Graph),
    "offload-modules": get_args(OffloadModule),
    "lora-modules": get_args(Adapted),
}
_BYTES: Final = {"fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2, "fp8": 1, "uint8": 1}
#: By the bytes of both moments of a parameter, their types.
_MOMENTS: Final[Mapping[float, tuple[str, str]]] = {
    pair[0][1] + pair[1][1]: (pair[0][0], pair[1][0])
    for pair in combinations_with_replacement({"fp8": 1, "bf16": 2, "fp32": 4}.items(), 2)
}
_FULL: Final = "full_iteration"
_OFFLOAD: Final = "optimizer-cpu-offload"
_FSDP: Final = "use-megatron-fsdp"
_AWAY: Final = "fine-grained-activation-offloading"
_NARROW_MOMENTS: Final = "use-precision-aware-optimizer"  # which Megatron wants beside the types of moments
#: What a graph of whole layers has in it.
_LAYER: Final[tuple[Graph, ...]] = ("attn", "mlp", "moe", "moe_router", "moe_preprocess")


def add_features(group: ArgumentParser | _ArgumentGroup) -> None:
    """Add them as options; those that are not given are None, or no attributes where the parser suppresses these."""
    for option in (*_SWITCHES.values(), _NARROW_MOMENTS, _OFFLOAD, _FSDP, _AWAY):
        group.add_argument(f"--{option}", action="store_const", const=True)
    for options, several in ((_CHOICES, None), (_LISTS, "+")):
        for option, choices in options.items():
            about = " | ".join(choices)
            group.add_argument(f"--{option}", nargs=several, choices=choices, metavar="NAME", help=about)
    group.add_argument("--activation-offload-fraction", type=_fraction, metavar="F", help="of groups (default: all)")
    group.add_argument("--delta-offload-bytes-across-pp-ranks", type=int, metavar="N", help="that a later stage keeps")
    group.add_argument(
        "--lora-rank", type=_rank, metavar="R", help="adapters of Megatron Bridge's (dim); nothing else trains"
    )
    group.add_argument("--optimizer-offload-fraction", type=_fraction, metavar="F", help="of parameters (default: all)")
    about = "tokens of the fullest expert rank over the mean rank's (default: 1)"
    group.add_argument("--routing-imbalance", type=_times, metavar="X", help=about)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"{text} is no fraction: give a number from 0 to 1, such as 0.5")
    return value


def _times(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < inf:
        raise ArgumentTypeError(f"{text} is less than the mean, or no number: give one from 1 on, such as 1.2")
    return value


def _rank(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise ArgumentTypeError(f"{text} is no rank: give a whole number of at least 1, or leave it out")
    return value


def features_of(value: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return fields of Run. ``value``: gives an argument as Megatron's parser or this one has it, or a default."""
    found: dict[str, Any] = {field: bool(value(option.replace("-", "_"), False)) for field, option in _SWITCHES.items()}
    found["quantized"] = _quantized(value)
    found["quantized_attention"] &= found["quantized"] not in (None, "nvfp4")
    found["dispatcher"] = "alltoall"
    if value("moe_token_dispatcher_type", "alltoall") == "flex":
        found["dispatcher"] = value("moe_flex_dispatcher_backend", "deepep")
    found["graphs"] = _graphs(value)
    moments = [str(value(f"{name}_dtype", "")).removeprefix("torch.") for name in ("exp_avg", "exp_avg_sq")]
    found["moment_bytes"] = sum(_BYTES.get(name, 4) for name in moments) / len(moments)
    optimizer = str(value("optimizer", "adam")).removeprefix("dist_")
    if optimizer in get_args(Optimizer):
        found["optimizer"] = optimizer
    found["sharding"] = value("data_parallel_sharding_strategy", "no_shard") if value("use_megatron_fsdp", 0) else None
    found |= _offloaded(value) | {"lora_rank": value("lora_rank", 0)}
    found["routing_imbalance"] = value("routing_imbalance", 1.0)
    if value("lora_rank", 0) and value("lora_modules", None):
        found["lora_modules"] = tuple(value("lora_modules", ()))
    found["delay_correction"] = value("evenpipe_delay_correction", None) or "none"
    found["optimizer_offload"] = 0.0
    if value("optimizer_cpu_offload", False):
        # `HybridDeviceOptimizer` hands no types of moments to the optimizers within it.
        found |= {"optimizer_offload": value("optimizer_offload_fraction", 1.0), "moment_bytes": 4}
    modules = tuple(name for name in value("recompute_modules", None) or () if name in get_args(Module))
    return found | ({"recomputed_modules": modules} if modules else {})


def _offloaded(value: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Megatron-LM 0.19 has the fraction and the difference between stages."""
    if not value("fine_grained_activation_offloading", False):
        return {"offload_modules": (), "offload_fraction": 1.0, "offload_delta_bytes": 0}
    names = value("offload_modules", None) or ()
    fused = ("expert_fc1", "moe_act") if "fused_group_mlp" in names else ()
    return {
        "offload_modules": tuple(name for name in (*names, *fused) if name in get_args(OffloadModule)),
        "offload_fraction": value("activation_offload_fraction", 1.0),
        "offload_delta_bytes": value("delta_offload_bytes_across_pp_ranks", 0),
    }


def _quantized(value: Callable[[str, Any], Any]) -> str | None:
    """The format's argument is `fp8` in Megatron, whose flag is --fp8-format."""
    if value("fp4", None) or value("fp4_format", None):
        return "nvfp4"
    recipe = value("fp8_recipe", "delayed") if value("fp8", None) or value("fp8_format", None) else None
    return None if recipe is None else str(getattr(recipe, "value", recipe))


def _graphs(value: Callable[[str, Any], Any]) -> tuple[str, ...]:
    """Without a scope whole layers are in graphs; older releases have switches of that, newer ones modules."""
    older = value("enable_cuda_graph", False) or value("external_cuda_graph", False)
    if value("cuda_graph_impl", "none") == "none":
        return _LAYER if older else ()
    if value("cuda_graph_impl", "none") == _FULL:
        return (_FULL,)
    scope = value("cuda_graph_scope", ()) or value("cuda_graph_modules", ())
    names = [str(getattr(one, "name", one)) for one in ([scope] if isinstance(scope, str) else scope)]
    return tuple(name for name in names if name in get_args(Graph)) if names and "full" not in names else _LAYER


def flags_of(run: Run) -> list[tuple[str, ...]]:
    """Return the flags, each with its values, that ask Megatron for them: what `features_of` reads."""
    return [(f"--{option}", *map(str, values)) for option, values in _asked(run)]


def of_megatron_s_schedules(run: Run) -> str:
    """Return the run's flag that only Megatron's own schedules go together with; empty where it has none."""
    return f"--{_FSDP}" if run.sharding else f"--{_AWAY}" if run.offload_modules else ""


def _asked(run: Run) -> Iterable[tuple[str, tuple[Any, ...]]]:
    if run.quantized == "nvfp4":
        yield "fp4-format", ("e2m1",)
    elif run.quantized is not None:
        yield "fp8-format", ("hybrid",)
        yield "fp8-recipe", (run.quantized,)
    yield from ((option, ()) for field, option in _SWITCHES.items() if getattr(run, field))
    if run.recompute == "selective" and run.recomputed_modules != Run.recomputed_modules:
        yield "recompute-modules", run.recomputed_modules
    if run.dispatcher != "alltoall":
        yield "moe-token-dispatcher-type", ("flex",)
        yield "moe-flex-dispatcher-backend", (run.dispatcher,)
    if run.graphs:
        yield "cuda-graph-impl", ("local" if _FULL in run.graphs else "transformer_engine",)
        yield "cuda-graph-scope", run.graphs
    if run.lora_rank:
        yield "lora-rank", (run.lora_rank,)
        yield "lora-modules", run.lora_modules
    if run.sharding is not None:
        yield _FSDP, ()
        yield "data-parallel-sharding-strategy", (run.sharding,)
    if run.offload_modules:
        yield _AWAY, ()
        yield "offload-modules", run.offload_modules
        if run.offload_fraction < 1:
            yield "activation-offload-fraction", (f"{run.offload_fraction:g}",)
        if run.offload_delta_bytes:
            yield "delta-offload-bytes-across-pp-ranks", (run.offload_delta_bytes,)
    if run.delay_correction != "none" and run.schedule == "2bw":
        yield _CORRECTION, (run.delay_correction,)
    if run.optimizer != "adam":
        yield "optimizer", ("dist_" * (run.optimizer == "muon" and run.sharded_optimizer is not False) + run.optimizer,)
    if run.optimizer_offload:
        yield _NARROW_MOMENTS, ()
        yield _OFFLOAD, ()
        yield "optimizer-offload-fraction", (f"{run.optimizer_offload:g}",)
    elif run.moment_bytes < 4:
        yield _NARROW_MOMENTS, ()
        first, second = _MOMENTS[2 * run.moment_bytes]
        yield "exp-avg-dtype", (first,)
        yield "exp-avg-sq-dtype", (second,)
