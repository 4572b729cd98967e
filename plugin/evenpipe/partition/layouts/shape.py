"""What a Megatron GPT is, as far as its layers' time and memory depend on it, read from Megatron's arguments."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass
from typing import Final

from evenpipe.planner.arguments import FlagError, Values, expert_layers, padded_vocabulary

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
        try:
            return cls._of(Values(args), world_size)
        except FlagError as error:
            raise LayoutError(str(error)) from None

    @classmethod
    def _of(cls, value: Values, world_size: int | None) -> Shape:
        hidden, heads = value.needed("hidden_size"), value.needed("num_attention_heads")
        layers = value.needed("num_layers")
        ffn = value.ffn
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
        return cls(
            hidden=hidden,
            heads=heads,
            groups=value.group_count,
            head_size=value("kv_channels", hidden // heads),
            ffn=ffn,
            gated=value.gated,
            bias=value("add_bias_linear", True),
            norm_bias=value("normalization", "LayerNorm") == "LayerNorm",
            sequence=value.needed("seq_length"),
            micro_batch=value("micro_batch_size", 1),
            vocabulary=padded_vocabulary(value),
            positions=value("max_position_embeddings", value.needed("seq_length")) if value.learned_positions else 0,
            tied=not value("untie_embeddings_and_output_weights", False),
            experts=expert_layers(value("moe_layer_freq", 1), layers) if count else (False,) * layers,
            expert_count=count,
            top_k=value("moe_router_topk", 2),
            expert_ffn=value("moe_ffn_hidden_size", ffn),
            shared_ffn=value("moe_shared_expert_intermediate_size", 0),
            mtp=value("mtp_num_layers", 0),
            precision=value.precision,
            recompute=value.recompute,
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
        value = Values(args)
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

    def _chunks(self, value: Values, stages: int) -> int:
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


def laid_out_by(args: Namespace) -> str | None:
    """The flag with which a user lays layers out by hand, if any."""
    return next((flag for name, flag in _HAND_LAYOUTS.items() if getattr(args, name, None)), None)


def _refuse(args: Namespace) -> None:
    if (flag := laid_out_by(args)) is not None:
        raise LayoutError(f"{flag}: already lays the layers out, by hand: leave it out, and the best is looked for")
    for name, flag in _OTHER_MODELS.items():
        if getattr(args, name, None):
            raise LayoutError(f"{flag}: layouts are found for GPT models with Megatron's own attention only")
