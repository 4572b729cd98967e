"""What a Megatron GPT is, as far as its layers' time and memory depend on it, read from Megatron's arguments."""

from __future__ import annotations

import ast
import math
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["LayoutError", "Pipeline", "Shape", "laid_out_by"]

_HAND_LAYOUTS: Final = {
    "pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
    "decoder_first_pipeline_num_layers": "--decoder-first-pipeline-num-layers",
    "decoder_last_pipeline_num_layers": "--decoder-last-pipeline-num-layers",
    "account_for_embedding_in_pipeline_split": "--account-for-embedding-in-pipeline-split",
    "account_for_loss_in_pipeline_split": "--account-for-loss-in-pipeline-split",
}
_OTHER_MODELS: Final = {
    "multi_latent_attention": "--multi-latent-attention",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "experimental_attention_variant": "--experimental-attention-variant",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
}
_HALF_BYTES: Final = 18  # weights and gradients 6 (2 + 4), optimizer 12: master weights and two moments
_SINGLE_BYTES: Final = 16  # weights and gradients 8, optimizer 8
_HALF_KEPT: Final = 6
_SINGLE_KEPT: Final = 8


class LayoutError(ValueError):
    """No layout can be found for these flags; the message is one line that names the flag and the remedy."""


@dataclass(frozen=True)
class Pipeline:
    """`stages` p, model `chunks` v of each, and `micro_batches` m of a batch."""

    stages: int
    chunks: int
    micro_batches: int

    @property
    def parts(self) -> int:
        return self.stages * self.chunks

    @property
    def schedule(self) -> str:
        """What Megatron runs on it."""
        return "interleaved" if self.chunks > 1 else "1f1b"


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT. `experts` has one entry a transformer layer: whether it is one of experts; `mtp` counts layers.

    `bias`, `norm_bias`: products and norms have one. `vocabulary` is padded; `positions` counts learned ones.
    `precision`: "fp32", "bf16" or "fp16".
    """

    hidden: int
    heads: int
    groups: int
    head_size: int
    ffn: int
    gated: bool
    bias: bool
    norm_bias: bool
    sequence: int
    micro_batch: int
    vocabulary: int
    positions: int
    tied: bool
    experts: tuple[bool, ...]
    expert_count: int
    top_k: int
    expert_ffn: int
    shared_ffn: int
    mtp: int
    precision: str
    recompute: str | None
    tensor_parallel: int
    context_parallel: int
    expert_parallel: int
    expert_tensor_parallel: int
    sequence_parallel: bool
    data_parallel: int
    distributed_optimizer: bool

    @property
    def element_bytes(self) -> int:
        """Of weights and activations."""
        return 4 if self.precision == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.sequence * self.micro_batch // self.context_parallel

    @property
    def parameter_bytes(self) -> float:
        """What a parameter of a dense layer takes on its rank."""
        return self._with_optimizer(self.data_parallel * self.context_parallel)

    @property
    def expert_parameter_bytes(self) -> float:
        """Experts are replicated less often: by what expert and expert-tensor parallelism leave."""
        return self._with_optimizer(max(1, self.stage_ranks // (self.expert_parallel * self.expert_tensor_parallel)))

    @property
    def stage_ranks(self) -> int:
        """Ranks of one stage."""
        return self.data_parallel * self.tensor_parallel * self.context_parallel

    def _with_optimizer(self, replicas: int) -> float:
        kept, total = (_HALF_KEPT, _HALF_BYTES) if self.element_bytes == 2 else (_SINGLE_KEPT, _SINGLE_BYTES)
        return kept + (total - kept) / (replicas if self.distributed_optimizer else 1)

    @classmethod
    def of(cls, args: Namespace, world_size: int | None = None) -> Shape:
        """From Megatron's arguments, parsed, validated or not. `world_size` None: as few GPUs as can be."""
        _refuse(args)
        value = _Values(args)
        hidden, heads = value.needed("hidden_size"), value.needed("num_attention_heads")
        layers = value.needed("num_layers")
        gated = bool(value("swiglu", False) or value("quick_geglu", False))
        ffn = value("ffn_hidden_size", 0) or (int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
        count = value("num_experts", 0)
        tensor = value("tensor_model_parallel_size", 1)
        context, stages = value("context_parallel_size", 1), value("pipeline_model_parallel_size", 1)
        expert, expert_tensor = value("expert_model_parallel_size", 1), value("expert_tensor_parallel_size", tensor)
        least = stages * math.lcm(tensor * context, expert * expert_tensor)
        world_size = world_size or least
        if world_size % least:
            raise LayoutError(
                f"world size {world_size}: no multiple of {least}, the fewest GPUs that these tensor, pipeline, "
                "context and expert parallel sizes need: name the number of GPUs of the whole run"
            )
        precision = "bf16" if value("bf16", False) else "fp16" if value("fp16", False) else "fp32"
        rotary = value("use_rotary_position_embeddings", False)  # the older flag
        learned = value("position_embedding_type", "learned_absolute") == "learned_absolute" and not rotary
        return cls(
            hidden=hidden,
            heads=heads,
            groups=(value("num_query_groups", heads) if value("group_query_attention", False) else heads),
            head_size=value("kv_channels", hidden // heads),
            ffn=ffn,
            gated=gated,
            bias=value("add_bias_linear", True),
            norm_bias=value("normalization", "LayerNorm") == "LayerNorm",
            sequence=value.needed("seq_length"),
            micro_batch=value("micro_batch_size", 1),
            vocabulary=_vocabulary(value, tensor),
            positions=value("max_position_embeddings", value.needed("seq_length")) if learned else 0,
            tied=not value("untie_embeddings_and_output_weights", False),
            experts=_expert_layers(value("moe_layer_freq", 1), layers) if count else (False,) * layers,
            expert_count=count,
            top_k=value("moe_router_topk", 2),
            expert_ffn=value("moe_ffn_hidden_size", ffn),
            shared_ffn=value("moe_shared_expert_intermediate_size", 0),
            mtp=value("mtp_num_layers", 0),
            precision=precision,
            recompute=value("recompute_granularity", "selective" if value("recompute_activations", False) else None),
            tensor_parallel=tensor,
            context_parallel=context,
            expert_parallel=expert,
            expert_tensor_parallel=expert_tensor,
            sequence_parallel=value("sequence_parallel", False),
            data_parallel=world_size // (stages * tensor * context),
            distributed_optimizer=value("use_distributed_optimizer", False),
        )

    def pipeline(self, args: Namespace) -> Pipeline:
        """How the flags cut it: stages, virtual stages as either of Megatron's two flags has them, micro-batches."""
        value = _Values(args)
        stages = value("pipeline_model_parallel_size", 1)
        chunks = value("num_virtual_stages_per_pipeline_rank", 0) or self._chunks(value, stages)
        if chunks > 1 and stages < 2:
            raise LayoutError("virtual stages: --pipeline-model-parallel-size 1 has none: leave them out")
        samples = self.micro_batch * self.data_parallel
        batch = value("global_batch_size", samples)
        if batch % samples:
            raise LayoutError(
                f"--global-batch-size {batch}: no multiple of --micro-batch-size {self.micro_batch} × "
                f"{self.data_parallel} replicas: change one of them"
            )
        return Pipeline(stages, chunks, batch // samples)

    def _chunks(self, value: _Values, stages: int) -> int:
        each = value("num_layers_per_virtual_pipeline_stage", 0)
        if not each:
            return 1
        layers = len(self.experts)
        if layers % (stages * each):
            raise LayoutError(
                f"--num-layers-per-virtual-pipeline-stage {each}: {layers} layers on {stages} stages are no multiple "
                "of it: say --num-virtual-stages-per-pipeline-rank V instead"
            )
        return int(layers // (stages * each))


class _Values:
    """Arguments by name; what a release does not have, or the user has not given, is the default."""

    def __init__(self, args: Namespace) -> None:
        self._args = args

    def __call__(self, name: str, default: Any) -> Any:
        found = getattr(self._args, name, None)
        return default if found is None else found

    def needed(self, name: str) -> int:
        found = self(name, None)
        if found is None:
            raise LayoutError(f"--{name.replace('_', '-')}: not given, and nothing says what it is: add it")
        return int(found)


def laid_out_by(args: Namespace) -> str | None:
    """The flag with which a user lays layers out by hand, if any."""
    return next((flag for name, flag in _HAND_LAYOUTS.items() if getattr(args, name, None)), None)


def _refuse(args: Namespace) -> None:
    if (flag := laid_out_by(args)) is not None:
        raise LayoutError(f"{flag}: already lays the layers out, by hand: leave it out, and the best is looked for")
    for name, flag in _OTHER_MODELS.items():
        if getattr(args, name, None):
            raise LayoutError(f"{flag}: layouts are found for GPT models with Megatron's own attention only")


def _vocabulary(value: _Values, tensor: int) -> int:
    """As Megatron pads it; its NullTokenizer has one token more than it is told."""
    if value("padded_vocab_size", 0):
        return int(value("padded_vocab_size", 0))
    if value("vocab_size", None) is None:
        raise LayoutError("--vocab-size: not given: add it, with the size of your tokenizer (before padding)")
    multiple = value("make_vocab_size_divisible_by", 128) * tensor
    tokens = value("vocab_size", 0) + (value("tokenizer_type", None) == "NullTokenizer")
    return int(-(-tokens // multiple) * multiple)


def _expert_layers(frequency: int | str | list[int], layers: int) -> tuple[bool, ...]:
    """`--moe-layer-freq`: every N-th layer, or one 1 (experts) or 0 (dense) a layer, as in "([0]*3+[1]*58)"."""
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(layers))
    pattern = _pattern(frequency) if isinstance(frequency, str) else frequency
    if len(pattern) != layers:
        raise LayoutError(f"--moe-layer-freq: {len(pattern)} entries for {layers} layers: give one a layer")
    return tuple(bool(entry) for entry in pattern)


def _pattern(text: str) -> list[int]:
    """The value of an expression of lists, `+` and `*`, without running it."""
    try:
        found = _value_of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        found = None
    if not isinstance(found, list):
        raise LayoutError(f"--moe-layer-freq {text}: neither a number nor a list such as ([0]*3+[1]*58)")
    return found


def _value_of(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _value_of(node.left), _value_of(node.right)
        return left + right if isinstance(node.op, ast.Add) else left * right
    return ast.literal_eval(node)
