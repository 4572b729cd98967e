"""Those of Megatron's flags that decide what a run needs and takes, where nothing parses all."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Final, NoReturn

from evenpipe.planner.arguments.values import FlagError

__all__ = ["parse_flags"]

_WHOLE: Final = (
    *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "kv-channels"),
    *("seq-length", "max-position-embeddings", "micro-batch-size", "global-batch-size", "vocab-size"),
    *("padded-vocab-size", "make-vocab-size-divisible-by", "mtp-num-layers", "num-experts", "moe-router-topk"),
    *("moe-ffn-hidden-size", "moe-shared-expert-intermediate-size", "pipeline-model-parallel-size"),
    *("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage", "tensor-model-parallel-size"),
    *("context-parallel-size", "expert-model-parallel-size", "expert-tensor-parallel-size", "recompute-num-layers"),
    *("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
    *("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim"),
)
_SWITCHES: Final = (
    *("group-query-attention", "untie-embeddings-and-output-weights", "swiglu", "bf16", "fp16", "qk-layernorm"),
    *("use-distributed-optimizer", "sequence-parallel", "recompute-activations", "mock-data"),
    *("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split", "overlap-grad-reduce"),
    *("overlap-param-gather", "use-flash-attn", "moe-grouped-gemm", "no-async-tensor-model-parallel-allreduce"),
    *("use-rotary-position-embeddings", "use-mcore-models", "no-masked-softmax-fusion", "no-rope-fusion"),
    *("no-gradient-accumulation-fusion", "no-bias-swiglu-fusion", "attention-softmax-in-fp32", "log-throughput"),
    *("override-opt_param-scheduler", "override-opt-param-scheduler"),
    *("multi-latent-attention", "accumulate-allreduce-grads-in-fp32", "use-tp-pp-dp-mapping", "legacy-tokenizer"),
)
_WORDS: Final = (
    *("moe-layer-freq", "pipeline-model-parallel-layout", "position-embedding-type", "normalization"),
    *("recompute-granularity", "recompute-method", "tokenizer-type", "transformer-impl", "attention-backend"),
    *("lr-decay-style", "data-path", "split", "tokenizer-model", "vocab-file", "merge-file", "save", "load"),
    *("moe-router-load-balancing-type", "moe-token-dispatcher-type", "distributed-backend", "ckpt-format"),
)
_NUMBERS: Final = (
    *("attention-dropout", "hidden-dropout", "lr", "min-lr", "weight-decay", "clip-grad", "adam-beta1", "adam-beta2"),
    *("init-method-std", "train-iters", "lr-warmup-iters", "lr-decay-iters", "log-interval", "eval-interval"),
    *("eval-iters", "save-interval", "seed", "num-workers", "moe-aux-loss-coeff", "mtp-loss-scaling-factor"),
    *("rotary-base", "rotary-percent", "norm-epsilon"),
)


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(message)


def parse_flags(flags: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Only what is given is an attribute; and the words that are not among these few.

    Raises FlagError for a value that is none.
    """
    parser = _Parser(allow_abbrev=False, argument_default=SUPPRESS, add_help=False)
    for names, kind in ((_WHOLE, int), (_WORDS, str), (_NUMBERS, float)):
        for name in names:
            parser.add_argument(f"--{name}", type=kind)
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    found, unknown = parser.parse_known_args(flags)
    if (frequency := getattr(found, "moe_layer_freq", "")).isdigit():
        found.moe_layer_freq = int(frequency)
    return found, unknown
