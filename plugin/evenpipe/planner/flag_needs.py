"""Flags of Megatron's that have an effect only beside others, and what Megatron does with them alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

from evenpipe.planner.descriptions import Model
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


def _modules(given: Given) -> Collection[str]:
    """What selective recomputation carries out again."""
    return given.run.recomputed_modules if given.run.recompute == "selective" else ()


def _on_host(given: Given) -> bool:
    return given.run.optimizer_offload > 0


def _narrow_moments(given: Given) -> bool:
    return given.run.moment_bytes == 4 or bool(given.value("use_precision_aware_optimizer", False))


_AWAY: Final = "fine_grained_activation_offloading"
_MLA: Final = "with --multi-latent-attention"
_IN_EXPERTS: Final = "in a model with experts"
_MOMENTS: Final = "with --use-precision-aware-optimizer"
NEEDS: Final = (
    Need("fp8-recipe", "with --fp8-format", _IGNORED, _eight_bits),
    Need("fp8-format", "without --fp4-format", _REFUSED, _eight_bits),
    Need("fp8-param-gather", "with --fp8-format", _REFUSED, _eight_bits),
    Need("fp8-dot-product-attention", "with --fp8-format", _IGNORED, _eight_bits),
    Need("fp4-recipe", "with --fp4-format", _IGNORED, lambda given: given.run.quantized == "nvfp4"),
    Need("cuda-graph-scope", "with --cuda-graph-impl", _IGNORED, lambda given: bool(given.run.graphs)),
    Need("cuda-graph-modules", "with --cuda-graph-impl", _IGNORED, lambda given: bool(given.run.graphs)),
    Need("moe-token-dispatcher-type", _IN_EXPERTS, _IGNORED, _experts),
    Need(
        "moe-flex-dispatcher-backend",
        "with --moe-token-dispatcher-type flex",
        _IGNORED,
        lambda given: given.run.dispatcher != "alltoall",
    ),
    Need("overlap-moe-expert-parallel-comm", _IN_EXPERTS, _REFUSED, _experts),
    Need(
        "overlap-moe-expert-parallel-comm",
        "with expert parallelism",
        _REFUSED,
        lambda given: given.run.expert > 1,
        sizes=True,
    ),
    Need(
        "overlap-moe-expert-parallel-comm",
        "with one pipeline stage, or with virtual stages",
        _REFUSED,
        lambda given: given.run.stages == 1 or given.run.chunks > 1,
        sizes=True,
    ),
    Need(
        "overlap-moe-expert-parallel-comm",
        "without recomputation of whole layers",
        _REFUSED,
        lambda given: given.run.recompute != "full",
        sizes=True,
    ),
    Need("use-transformer-engine-op-fuser", _IN_EXPERTS, _UNCOUNTED, _experts),
    Need(
        "tp-comm-overlap",
        "with tensor parallelism and sequence parallelism",
        _REFUSED,
        lambda given: bool(given.run.sequence_parallel) and given.run.tensor > 1,
        sizes=True,
    ),
    Need(
        "recompute-modules",
        "with selective recomputation",
        _IGNORED,
        lambda given: given.run.recompute == "selective",
        sizes=True,
    ),
    Need(
        "recompute-modules mla_up_proj",
        _MLA,
        _REFUSED,
        lambda given: _latent(given) or "mla_up_proj" not in _modules(given),
    ),
    Need(
        "recompute-modules moe_act",
        _IN_EXPERTS,
        _REFUSED,
        lambda given: _experts(given) or "moe_act" not in _modules(given),
    ),
    Need(
        "recompute-modules moe, shared_experts",
        _IN_EXPERTS,
        _IGNORED,
        lambda given: _experts(given) or not {"moe", "shared_experts"} & set(_modules(given)),
    ),
    Need(
        "recompute-modules layernorm, moe_act",
        "with another --fp8-recipe than delayed",
        _REFUSED,
        lambda given: given.run.quantized != "delayed" or not {"layernorm", "moe_act"} & set(_modules(given)),
    ),
    Need(
        "recompute-method",
        "with --recompute-granularity full",
        _IGNORED,
        lambda given: given.run.recompute == "full",
        sizes=True,
    ),
    Need(
        "recompute-num-layers",
        "with --recompute-granularity full",
        _IGNORED,
        lambda given: given.run.recompute == "full",
        sizes=True,
    ),
    Need("exp-avg-dtype", _MOMENTS, _REFUSED, _narrow_moments),
    Need("exp-avg-sq-dtype", _MOMENTS, _REFUSED, _narrow_moments),
    Need(
        "use-precision-aware-optimizer",
        "with the distributed optimizer",
        _REFUSED,
        lambda given: given.run.sharded_optimizer is not False,
    ),
    Need(
        "use-precision-aware-optimizer", "with --optimizer adam", _REFUSED, lambda given: given.run.optimizer == "adam"
    ),
    Need(
        "optimizer-cpu-offload",
        _MOMENTS,
        _REFUSED,
        lambda given: bool(given.value("use_precision_aware_optimizer", False)),
    ),
    Need("optimizer-offload-fraction", "with --optimizer-cpu-offload", _IGNORED, _on_host),
    Need("overlap-cpu-optimizer-d2h-h2d", "with --optimizer-cpu-offload", _IGNORED, _on_host),
    Need("exp-avg-dtype", "without --optimizer-cpu-offload", _IGNORED, lambda given: not _on_host(given)),
    Need("exp-avg-sq-dtype", "without --optimizer-cpu-offload", _IGNORED, lambda given: not _on_host(given)),
    Need("lora-modules", "with --lora-rank", _UNCOUNTED, lambda given: given.run.lora_rank > 0),
    Need(
        "data-parallel-sharding-strategy", "with --use-megatron-fsdp", _IGNORED, lambda given: bool(given.run.sharding)
    ),
    *(
        Need(
            option, "with --fine-grained-activation-offloading", _IGNORED, lambda given: bool(given.value(_AWAY, False))
        )
        for option in (
            *("offload-modules", "activation-offload-fraction", "delta-offload-bytes-across-pp-ranks"),
            "min-offloaded-tensor-size",
        )
    ),
    Need(
        "fine-grained-activation-offloading",
        "with --offload-modules",
        _REFUSED,
        lambda given: bool(given.run.offload_modules),
    ),
    *(
        Need(option, "with --optimizer muon", _IGNORED, lambda given: given.run.optimizer == "muon")
        for option in ("muon-momentum", "muon-num-ns-steps", "muon-tp-mode", "muon-scale-mode", "muon-fp32-matmul-prec")
    ),
    Need(
        "num-query-groups",
        "with --group-query-attention",
        _IGNORED,
        lambda given: bool(given.value("group_query_attention", False)),
    ),
    *(
        Need(option, _MLA, _IGNORED, _latent)
        for option in ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")
    ),
    Need("moe-ffn-hidden-size", _IN_EXPERTS, _REFUSED, _experts),
    *(
        Need(option, _IN_EXPERTS, _IGNORED, _experts)
        for option in (
            *("moe-router-topk", "moe-layer-freq", "moe-shared-expert-intermediate-size", "moe-grouped-gemm"),
            *("moe-router-num-groups", "moe-router-group-topk", "moe-router-load-balancing-type"),
            *("moe-aux-loss-coeff", "expert-tensor-parallel", "expert-tensor-parallel-size"),
        )
    ),
    Need(
        "window-attn-skip-freq",
        "with --window-size",
        _IGNORED,
        lambda given: bool(given.value("window_size", None)),
    ),
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
