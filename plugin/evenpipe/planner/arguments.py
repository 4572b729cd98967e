"""The model and the run that a script of Megatron-LM's arguments describe."""

from __future__ import annotations

import ast
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NoReturn

from evenpipe.descriptions import Model, described
from evenpipe.planner.features import add_features, features_of
from evenpipe.planner.model_flags import MODEL_FLAGS
from evenpipe.planner.run import Attention, Run
from evenpipe.wording.parsing import in_plain_words

__all__ = [
    "FlagError",
    "Pipelined",
    "Values",
    "expert_layers",
    "known_flags",
    "model_of",
    "padded_vocabulary",
    "parse_flags",
    "run_of",
    "undescribed",
]


class FlagError(ValueError):
    """Flags from which nothing can be told; the message is one line that names the flag and the remedy."""


class Values:
    """Arguments by name; what a release does not have, or the user has not given, is the default."""

    def __init__(self, args: Namespace) -> None:
        self._args = args

    def __call__(self, name: str, default: Any) -> Any:
        found = getattr(self._args, name, None)
        return default if found is None else found

    def needed(self, name: str) -> int:
        """Raises FlagError where it is not given."""
        found = self(name, None)
        if found is None:
            raise FlagError(f"--{name.replace('_', '-')}: not given, and nothing says what it is: add it")
        return int(found)

    @property
    def group_count(self) -> int:
        """Return the number of groups of keys and values: one a head without grouped-query attention."""
        heads = self.needed("num_attention_heads")
        return int(self("num_query_groups", heads)) if self("group_query_attention", False) else heads

    @property
    def gated(self) -> bool:
        """Return whether the MLP is gated (SwiGLU or quick GEGLU)."""
        return bool(self("swiglu", False) or self("quick_geglu", False))

    @property
    def ffn(self) -> int:
        """Inner size of the MLP, as Megatron completes it."""
        hidden = self.needed("hidden_size")
        return int(self("ffn_hidden_size", 0)) or (int(4 * hidden * 2 / 3 / 64) * 64 if self.gated else 4 * hidden)

    @property
    def learned_positions(self) -> bool:
        """Return whether positions have parameters."""
        rotary = self("use_rotary_position_embeddings", False)  # the older flag
        return self("position_embedding_type", "learned_absolute") == "learned_absolute" and not rotary

    @property
    def precision(self) -> str:
        """fp32, bf16 or fp16."""
        return "bf16" if self("bf16", False) else "fp16" if self("fp16", False) else "fp32"

    @property
    def recompute(self) -> str | None:
        """Full, selective or None."""
        return self("recompute_granularity", "selective" if self("recompute_activations", False) else None)  # type: ignore[no-any-return]


def padded_vocabulary(value: Values) -> int:
    """As Megatron pads it; its NullTokenizer has one token more than it is told."""
    if value("padded_vocab_size", 0):
        return int(value("padded_vocab_size", 0))
    if value("vocab_size", None) is None:
        raise FlagError("--vocab-size: not given: add it, with the size of your tokenizer (before padding)")
    multiple = value("make_vocab_size_divisible_by", 128) * value("tensor_model_parallel_size", 1)
    tokens = value("vocab_size", 0) + (value("tokenizer_type", None) == "NullTokenizer")
    return int(-(-tokens // multiple) * multiple)


def expert_layers(frequency: int | str | Sequence[int], layers: int) -> tuple[bool, ...]:
    """`--moe-layer-freq`: every N-th layer, or one 1 (experts) or 0 (dense) a layer, as in "([0]*3+[1]*58)"."""
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(layers))
    pattern = _pattern(frequency) if isinstance(frequency, str) else frequency
    if len(pattern) != layers:
        raise FlagError(f"--moe-layer-freq: {len(pattern)} entries for {layers} layers: give one a layer")
    return tuple(bool(entry) for entry in pattern)


def _pattern(text: str) -> list[int]:
    """Return the value of an expression of lists, `+` and `*`, without running it."""
    try:
        found = _value_of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        found = None
    if not isinstance(found, list):
        raise FlagError(f"--moe-layer-freq {text}: neither a number nor a list such as ([0]*3+[1]*58)")
    return found


def _value_of(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _value_of(node.left), _value_of(node.right)
        return left + right if isinstance(node.op, ast.Add) else left * right
    return ast.literal_eval(node)


_WHOLE: Final = (
    *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "kv-channels"),
    *("seq-length", "max-position-embeddings", "micro-batch-size", "global-batch-size", "vocab-size"),
    *("padded-vocab-size", "make-vocab-size-divisible-by", "mtp-num-layers", "num-experts", "moe-router-topk"),
    *("moe-ffn-hidden-size", "moe-shared-expert-intermediate-size", "pipeline-model-parallel-size"),
    *("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage", "tensor-model-parallel-size"),
    *("context-parallel-size", "expert-model-parallel-size", "expert-tensor-parallel-size", "recompute-num-layers"),
    *("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
    *("moe-router-num-groups", "moe-router-group-topk"),
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
    *("grad-reduce-in-bf16", "quick-geglu"),
    *("multi-latent-attention", "accumulate-allreduce-grads-in-fp32", "use-tp-pp-dp-mapping", "legacy-tokenizer"),
)
_WORDS: Final = (
    *("moe-layer-freq", "pipeline-model-parallel-layout", "position-embedding-type", "normalization"),
    *("recompute-granularity", "recompute-method", "tokenizer-type", "transformer-impl", "attention-backend"),
    *("lr-decay-style", "data-path", "split", "tokenizer-model", "vocab-file", "merge-file", "save", "load"),
    *("moe-router-load-balancing-type", "distributed-backend", "ckpt-format"),
    "evenpipe-schedule",
)
_NUMBERS: Final = (
    *("attention-dropout", "hidden-dropout", "lr", "min-lr", "weight-decay", "clip-grad", "adam-beta1", "adam-beta2"),
    *("init-method-std", "train-iters", "lr-warmup-iters", "lr-decay-iters", "log-interval", "eval-interval"),
    *("eval-iters", "save-interval", "seed", "num-workers", "moe-aux-loss-coeff", "mtp-loss-scaling-factor"),
    *("rotary-base", "rotary-percent", "norm-epsilon"),
)

#: Flags of models whose layers are not described.
_UNDESCRIBED: Final = {
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "experimental_attention_variant": "--experimental-attention-variant",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
    "hybrid_override_pattern": "--hybrid-override-pattern",
    "is_hybrid_model": "--is-hybrid-model",
}


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(in_plain_words(message))


def parse_flags(flags: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Only what is given is an attribute; and the words that are not among these few.

    Raises FlagError for a value that is none.
    """
    parser = _flag_parser()
    found, unknown = parser.parse_known_args(flags)
    if (frequency := getattr(found, "moe_layer_freq", "")).isdigit():
        found.moe_layer_freq = int(frequency)
    return found, unknown


def known_flags() -> dict[str, Action]:
    """Return the flags that are read without Megatron's own parser, each with what argparse does for it."""
    return {option: action for action in _flag_parser()._actions for option in action.option_strings}


def _flag_parser() -> ArgumentParser:
    """Return the parser of the flags of Megatron-LM that are read without Megatron's own."""
    parser = _Parser(allow_abbrev=False, argument_default=SUPPRESS, add_help=False)
    for names, kind in ((_WHOLE, int), (_WORDS, str), (_NUMBERS, float)):
        for name in names:
            parser.add_argument(f"--{name}", type=kind)
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    parser.add_argument("--no-overlap-p2p-communication", action="store_false", dest="overlap_p2p_comm")
    parser.add_argument("--window-size", type=lambda text: tuple(map(int, text.strip("()").split(","))))
    parser.add_argument("--window-attn-skip-freq", type=int)
    for name, flag in _UNDESCRIBED.items():
        parser.add_argument(flag, dest=name, nargs="?", const=True)
    add_features(parser)
    return parser


def undescribed(args: Namespace) -> str | None:
    """Return the flag that asks for layers that are not described, if any."""
    return next((flag for name, flag in _UNDESCRIBED.items() if getattr(args, name, None)), None)


def model_of(args: Namespace, name: str, causal: bool = True) -> Model:
    """From arguments that Megatron has parsed; ``causal``: each token sees those before it, as BERT's do not.

    Raises FlagError for a model that is none of these, DescriptionError for sizes that do not go together.
    """
    value = Values(args)
    if (flag := undescribed(args)) is not None:
        raise FlagError(f"{flag}: estimates are of GPT and BERT with equal layers: none can be made of this run")
    said: dict[str, Any] = {
        "layers": value.needed("num_layers"),
        "hidden": value.needed("hidden_size"),
        "heads": value.needed("num_attention_heads"),
        "key_value_heads": value.group_count,
        "head_dim": value("kv_channels", 0),
        "ffn": value.ffn,
        "gated": value.gated,
        "norm": "rms" if value("normalization", "LayerNorm") == "RMSNorm" else "layer",
        "biases": bool(value("add_bias_linear", True)),
        "dropout": bool(value("hidden_dropout", 0.1) or value("attention_dropout", 0.1)),
        "positions": "learned" if value.learned_positions else "rotary",
        "max_positions": value("max_position_embeddings", 0),
        "vocabulary": padded_vocabulary(value),
        "sequence": value.needed("seq_length"),
        "causal": causal,
        "tied": not value("untie_embeddings_and_output_weights", False),
        "mtp_layers": value("mtp_num_layers", 0),
        "qk_norm": bool(value("qk_layernorm", False)) and not value("multi_latent_attention", False),
        "window": _window(value),
        "left_out": _left_out(value),
    }
    if value("num_experts", 0):
        said["experts"] = _experts(value)
    if value("multi_latent_attention", False):
        said |= {"key_value_heads": 0, "latent": _latent(value)}
    return described(Model, name, said, "the flags", MODEL_FLAGS)


def _window(value: Values) -> int:
    """Return the tokens that every second layer's attention sees, if that is how layers alternate."""
    size = value("window_size", None)
    return int(size[0]) if size and value("window_attn_skip_freq", None) == 2 else 0


def _left_out(value: Values) -> tuple[str, ...]:
    """Return what a layer has that no description says."""
    found = {
        "biases of queries, keys and values": value("add_qkv_bias", False) and not value("add_bias_linear", True),
        "gates of attention's output": value("attention_output_gate", False),
        "sliding windows (all attention is estimated in full)": value("window_size", None) and not _window(value),
    }
    return tuple(words for words, has in found.items() if has)


def _experts(value: Values) -> dict[str, Any]:
    layers = expert_layers(value("moe_layer_freq", 1), value.needed("num_layers"))
    return {
        "count": value("num_experts", 0),
        "chosen": value("moe_router_topk", 2),
        "ffn": value("moe_ffn_hidden_size", value.ffn),
        "shared_ffn": value("moe_shared_expert_intermediate_size", 0),
        "groups": value("moe_router_num_groups", 1),
        "chosen_groups": value("moe_router_group_topk", 1),
        "layers": layers,
    }


def _latent(value: Values) -> dict[str, int]:
    return {
        "query_rank": value("q_lora_rank", 0),
        "key_value_rank": value("kv_lora_rank", 512),
        "plain_dim": value("qk_head_dim", 128),
        "rotary_dim": value("qk_pos_emb_head_dim", 64),
        "value_dim": value("v_head_dim", 128),
    }


class Pipelined(NamedTuple):
    """The pipeline that EvenPipe is asked for: ``schedule`` (None: Megatron's), BPipe, and micro-batches in a row."""

    schedule: str | None = None
    bpipe: bool = False
    group_size: int = 1


def run_of(
    args: Namespace, pipelined: Pipelined, layout: Sequence[Sequence[str]] | None = None, expandable: bool = False
) -> Run:
    """From arguments that Megatron has validated. ``layout``: the kinds of layers of each part, by name, if given.

    With EvenPipe's schedules hand-overs travel beside compute, with Megatron's own as `--overlap-p2p-communication`
    has it. ``expandable``: whether its environment gives PyTorch's allocator expandable segments.
    """
    value = Values(args)
    stages, chunks = value("pipeline_model_parallel_size", 1), value("virtual_pipeline_model_parallel_size", None) or 1
    in_groups = value("microbatch_group_size_per_vp_stage", None) if chunks > 1 else None
    ours = pipelined.schedule is not None or pipelined.bpipe
    waits = () if ours else ("1f1b",) if chunks == 1 or value("overlap_p2p_comm", True) else ("1f1b", "interleaved")
    further = [n for n, kinds in enumerate(layout or ()) if "mtp" in kinds]
    precision: Any = value.precision
    # `validate_args` has bf16 gradients accumulated in fp32 unless it is told to reduce them in bf16.
    half = precision == "fp16" or value("grad_reduce_in_bf16", False)
    in_fp32 = value("accumulate_allreduce_grads_in_fp32", False) or not half
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
        sharded_optimizer=bool(
            value("use_distributed_optimizer", False)
            or value("use_layer_wise_distributed_optimizer", False)
            or value("optimizer", "adam") == "dist_muon"
        ),
        gradients_in_fp32=bool(in_fp32),
        overlap_collectives=bool(value("async_tensor_model_parallel_allreduce", True)),
        overlap_gradients=bool(value("overlap_grad_reduce", False)),
        overlap_parameters=bool(value("overlap_param_gather", False)),
        fused_softmax=bool(value("masked_softmax_fusion", True)),
        blocking=waits,
        placement="pipeline" if value("use_tp_pp_dp_mapping", False) else "replicas",
        expandable_segments=expandable,
        **features_of(value),
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
