"""Flags of Megatron's that have an effect only beside others, and what Megatron does with them alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

from evenpipe.descriptions import Model
from evenpipe.planner.run import EstimateError, Run

__all__ = ["NEEDS", "Given", "Need", "without_effect"]


class Given(NamedTuple):
    """``names``: options that were given, without dashes. ``value``: gives an argument by name, or a default.

    refusing: by a framework that refuses as Megatron does.
    """

    names: Collection[str]
    value: Callable[[str, Any], Any]
    model: Model
    run: Run
    refusing: bool = True


class Need(NamedTuple):
    """One option. ``when``: in words, what it needs, which ``met`` looks for; ``otherwise``: what becomes of it.

    sizes: whether it is met depends on sizes or on recomputation, which a search chooses.
    """

    option: str
    when: str
    otherwise: str
    met: Callable[[Given], bool]
    sizes: bool = False

    @property
    def line(self) -> str:
        return f"--{self.option}: works only {self.when}; {self.otherwise} here: leave it out, or change that"


#: By `validate_args` (training/arguments.py), `TransformerConfig.__post_init__` and `OptimizerConfig.__post_init__` of
#: Megatron-LM 0.16.1: a value that they raise for, one that nothing reads, and one that only this estimate leaves out.
_REFUSED: Final = "Megatron refuses it"
_IGNORED: Final = "Megatron ignores it"
_UNCOUNTED: Final = "this estimate does not count it"


def _eight_bits(given: Given) -> bool:
    return given.run.quantized not in (None, "nvfp4")


def _experts(given: Given) -> bool:
    return given.model.experts is not None


def _latent(given: Given) -> bool:
    return given.model.latent is not None


def _narrow_moments(given: Given) -> bool:
    return given.run.moment_bytes == 4 or bool(given.value("use_precision_aware_optimizer", False))


def _is(field: str, *values: object) -> Callable[[Given], bool]:
    """Return whether a field of the run has one of these values; without any, whether it is set."""
    return lambda given: getattr(given.run, field) in values if values else bool(getattr(given.run, field))


def _not(field: str, value: object) -> Callable[[Given], bool]:
    return lambda given: getattr(given.run, field) != value


def _given(name: str) -> Callable[[Given], bool]:
    """Return whether a flag was given, by its argument's name."""
    return lambda given: bool(given.value(name, None))


def _without(*modules: str) -> Callable[[Given], bool]:
    """Return whether selective recomputation has none of these."""
    return lambda given: given.run.recompute != "selective" or not {*modules} & {*given.run.recomputed_modules}


def _either(*conditions: Callable[[Given], bool]) -> Callable[[Given], bool]:
    return lambda given: any(met(given) for met in conditions)


def _each(options: str, when: str, otherwise: str, met: Callable[[Given], bool], sizes: bool = False) -> list[Need]:
    """Return a row for each of the options, with a blank between two, that need the same."""
    return [Need(option, when, otherwise, met, sizes) for option in options.split()]


_FP8: Final = "with --fp8-format"
_MLA: Final = "with --multi-latent-attention"
_IN_EXPERTS: Final = "in a model with experts"
_MOMENTS: Final = "with --use-precision-aware-optimizer"
_FULL: Final = "with --recompute-granularity full"
_OFFLOAD: Final = "with --optimizer-cpu-offload"
_AWAY: Final = "with --fine-grained-activation-offloading"
_OVERLAP: Final = "overlap-moe-expert-parallel-comm"
_MODULES: Final = "recompute-modules"
NEEDS: Final = (
    *_each("fp8-recipe fp8-dot-product-attention", _FP8, _IGNORED, _eight_bits),
    *_each("fp8-format", "without --fp4-format", _REFUSED, _eight_bits),
    *_each("fp8-param-gather", _FP8, _REFUSED, _eight_bits),
    *_each("fp4-recipe", "with --fp4-format", _IGNORED, _is("quantized", "nvfp4")),
    *_each("cuda-graph-scope cuda-graph-modules", "with --cuda-graph-impl", _IGNORED, _is("graphs")),
    *_each(
        "moe-flex-dispatcher-backend", "with --moe-token-dispatcher-type flex", _IGNORED, _not("dispatcher", "alltoall")
    ),
    *_each(f"{_OVERLAP} moe-ffn-hidden-size", _IN_EXPERTS, _REFUSED, _experts),
    *_each(_OVERLAP, "with expert parallelism", _REFUSED, _not("expert", 1), sizes=True),
    *_each(
        _OVERLAP,
        "with one pipeline stage, or with virtual stages",
        _REFUSED,
        _either(_is("stages", 1), _not("chunks", 1)),
        sizes=True,
    ),
    *_each(_OVERLAP, "without recomputation of whole layers", _REFUSED, _not("recompute", "full"), sizes=True),
    *_each("use-transformer-engine-op-fuser routing-imbalance", _IN_EXPERTS, _UNCOUNTED, _experts),
    *_each(
        "tp-comm-overlap",
        "with tensor parallelism and sequence parallelism",
        _REFUSED,
        lambda given: bool(given.run.sequence_parallel) and given.run.tensor > 1,
        sizes=True,
    ),
    *_each(_MODULES, "with selective recomputation", _IGNORED, _is("recompute", "selective"), sizes=True),
    Need(f"{_MODULES} mla_up_proj", _MLA, _REFUSED, _either(_latent, _without("mla_up_proj"))),
    Need(f"{_MODULES} moe_act", _IN_EXPERTS, _REFUSED, _either(_experts, _without("moe_act"))),
    Need(
        f"{_MODULES} moe, shared_experts", _IN_EXPERTS, _IGNORED, _either(_experts, _without("moe", "shared_experts"))
    ),
    Need(
        f"{_MODULES} layernorm, moe_act",
        "with another --fp8-recipe than delayed",
        _REFUSED,
        _either(_not("quantized", "delayed"), _without("layernorm", "moe_act")),
    ),
    *_each("recompute-method recompute-num-layers", _FULL, _IGNORED, _is("recompute", "full"), sizes=True),
    *_each("exp-avg-dtype exp-avg-sq-dtype", _MOMENTS, _REFUSED, _narrow_moments),
    *_each(
        "use-precision-aware-optimizer", "with the distributed optimizer", _REFUSED, _not("sharded_optimizer", False)
    ),
    *_each("use-precision-aware-optimizer", "with --optimizer adam", _REFUSED, _is("optimizer", "adam")),
    *_each("optimizer-cpu-offload", _MOMENTS, _REFUSED, _given("use_precision_aware_optimizer")),
    *_each("optimizer-offload-fraction overlap-cpu-optimizer-d2h-h2d", _OFFLOAD, _IGNORED, _is("optimizer_offload")),
    *_each("exp-avg-dtype exp-avg-sq-dtype", "without --optimizer-cpu-offload", _IGNORED, _is("optimizer_offload", 0)),
    *_each("lora-modules", "with --lora-rank", _UNCOUNTED, _is("lora_rank")),
    *_each("data-parallel-sharding-strategy", "with --use-megatron-fsdp", _IGNORED, _is("sharding")),
    *_each(
        "offload-modules activation-offload-fraction delta-offload-bytes-across-pp-ranks min-offloaded-tensor-size",
        _AWAY,
        _IGNORED,
        _given("fine_grained_activation_offloading"),
    ),
    *_each("fine-grained-activation-offloading", "with --offload-modules", _REFUSED, _is("offload_modules")),
    *_each(
        "muon-momentum muon-num-ns-steps muon-tp-mode muon-scale-mode muon-fp32-matmul-prec",
        "with --optimizer muon",
        _IGNORED,
        _is("optimizer", "muon"),
    ),
    *_each("num-query-groups", "with --group-query-attention", _IGNORED, _given("group_query_attention")),
    *_each("q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim", _MLA, _IGNORED, _latent),
    *_each(
        "moe-token-dispatcher-type moe-router-topk moe-layer-freq moe-shared-expert-intermediate-size moe-grouped-gemm "
        "moe-router-num-groups moe-router-group-topk moe-router-load-balancing-type moe-aux-loss-coeff "
        "expert-tensor-parallel expert-tensor-parallel-size",
        _IN_EXPERTS,
        _IGNORED,
        _experts,
    ),
    *_each("window-attn-skip-freq", "with --window-size", _IGNORED, _given("window_size")),
)


def without_effect(given: Given, searched: bool = False) -> list[str]:
    """Return a line for each option that has no effect. ``searched``: a search chooses the sizes.

    Raises EstimateError, one line, for one that Megatron refuses.
    """
    lines = []
    for need in NEEDS:
        if need.option.partition(" ")[0] not in given.names or (need.sizes and searched) or need.met(given):
            continue
        if need.otherwise != _REFUSED:
            lines.append(need.line)
        elif given.refusing:
            raise EstimateError(need.line)
    return lines
