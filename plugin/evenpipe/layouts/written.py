"""A layout as `evenpipe partition --megatron --out` wrote it: read again, and compared with a run it is given to."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evenpipe.layouts.gpt import Gpt, LayoutError, Pipeline, laid_out_by
from evenpipe.planner.arguments import expert_layers
from evenpipe.wording.validation import first_message

__all__ = ["FORMAT", "Shape", "StagePlan", "WrittenLayout"]

FORMAT: Final = "evenpipe.layout/1"

#: By key of a plan's shape: its flag, and its attribute of a TransformerConfig. Replicas, and what they share of an
#: optimizer, do not matter to a layout; Megatron itself compares its numbers of layers and stages with the layout.
_ENTRIES: Final[Mapping[str, tuple[str, str | None]]] = {
    "tensor_parallel": ("--tensor-model-parallel-size", "tensor_model_parallel_size"),
    "context_parallel": ("--context-parallel-size", "context_parallel_size"),
    "expert_parallel": ("--expert-model-parallel-size", "expert_model_parallel_size"),
    "expert_tensor_parallel": ("--expert-tensor-parallel-size", None),
    "sequence_parallel": ("--sequence-parallel", "sequence_parallel"),
    "hidden": ("--hidden-size", "hidden_size"),
    "heads": ("--num-attention-heads", "num_attention_heads"),
    "groups": ("--num-query-groups", "num_query_groups"),
    "head_size": ("--kv-channels", "kv_channels"),
    "ffn": ("--ffn-hidden-size", "ffn_hidden_size"),
    "gated": ("--swiglu", "gated_linear_unit"),
    "bias": ("--add-bias-linear", None),
    "norm_bias": ("biases of --normalization", None),
    "sequence": ("--seq-length", None),
    "micro_batch": ("--micro-batch-size", None),
    "vocabulary": ("padded --vocab-size", None),
    "positions": ("learned positions of --max-position-embeddings", None),
    "tied": ("tied embeddings", None),
    "experts": ("layers of experts by --moe-layer-freq", None),
    "expert_count": ("--num-experts", "num_moe_experts"),
    "top_k": ("--moe-router-topk", "moe_router_topk"),
    "expert_ffn": ("--moe-ffn-hidden-size", "moe_ffn_hidden_size"),
    "shared_ffn": ("--moe-shared-expert-intermediate-size", "moe_shared_expert_intermediate_size"),
    "mtp": ("--mtp-num-layers", "mtp_num_layers"),
    "precision": ("precision", None),
    "recompute": ("--recompute-granularity", None),
}
_TOP_K: Final = 2  # `--moe-router-topk`, if left out
_VIRTUAL: Final = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


@dataclass(frozen=True)
class Shape:
    """A model as a plan has it, by the names of its document.

    `experts` has one entry a transformer layer: whether it is one of experts; `mtp` counts layers. `bias`, `norm_bias`:
    products and norms have one. `vocabulary` is padded; `positions` counts learned ones.
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

    @classmethod
    def of(cls, gpt: Gpt) -> Shape:
        model, run = gpt
        experts = model.experts
        return cls(
            hidden=model.hidden,
            heads=model.heads,
            groups=model.key_value_heads,
            head_size=model.head_dim,
            ffn=model.ffn,
            gated=model.gated,
            bias=model.biases,
            norm_bias=model.norm == "layer",
            sequence=model.sequence,
            micro_batch=run.micro_batch,
            vocabulary=model.vocabulary,
            positions=(model.max_positions or model.sequence) if model.positions == "learned" else 0,
            tied=model.tied,
            experts=tuple(gpt.has_experts(layer) for layer in range(model.layers)),
            expert_count=experts.count if experts else 0,
            top_k=experts.chosen if experts else _TOP_K,
            expert_ffn=experts.ffn if experts else model.ffn,
            shared_ffn=experts.shared_ffn if experts else 0,
            mtp=model.mtp_layers,
            precision=str(run.precision),
            recompute=None if run.recompute == "none" else run.recompute,
            tensor_parallel=run.tensor,
            context_parallel=run.context,
            expert_parallel=run.expert,
            expert_tensor_parallel=run.expert_ways,
            sequence_parallel=bool(run.sequence_parallel),
            data_parallel=run.data,
            distributed_optimizer=bool(run.sharded_optimizer),
        )


@dataclass(frozen=True)
class StagePlan:
    """A stage: its chunks as Megatron writes them, milliseconds of a micro-batch through all of them, bytes at most.

    The first `recompute_layers` transformer layers of each chunk are computed again in its backward, whose milliseconds
    have that; the one layer that is there again at a time is not in the bytes.
    """

    layers: tuple[str, ...]
    forward_ms: float
    backward_ms: float
    peak_bytes: int
    recompute_layers: int = 0


class WrittenLayout(BaseModel):
    """What a run needs of a plan: the layout, what it is for, and what was predicted of each stage.

    `halves`: the parts (chunk by chunk, stage by stage) that begin with the MLP of the layer whose attention the part
    before ends with; `layout` has such a layer there.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["evenpipe.layout/1"] = Field(FORMAT, repr=False)
    layout: str
    schedule: str
    shape: Shape
    pipeline: Pipeline
    stages: tuple[StagePlan, ...]
    halves: tuple[int, ...] = ()

    @classmethod
    def read(cls, path: Path) -> WrittenLayout:
        """Raises LayoutError, one line that names the file."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "no text"
            raise LayoutError(f"{path}: cannot be read: {reason}") from None
        except ValidationError as error:
            said = first_message(error, "document")
            raise LayoutError(f"{path}: no layout that `evenpipe partition --megatron --out` wrote: {said}") from None

    def difference(self, args: Namespace) -> str | None:
        """Why it is not for Megatron's arguments, validated or not, in words that follow its name; None: it is."""
        if (flag := laid_out_by(args)) is not None:
            return f"{flag} lays the layers out too: leave one of them out"
        if self.halves and self.pipeline.chunks > 1:
            # Ranks make one chunk after the other, and tied embeddings join the first with the last in between.
            return "the plan cuts layers in half on virtual stages, which cannot be made: plan without them"
        for name in _VIRTUAL:
            if getattr(args, name, None):
                flag = "--" + name.replace("_", "-")
                return f"{flag}: the plan's layout says which virtual stages there are: leave {flag} out"
        stages = getattr(args, "pipeline_model_parallel_size", None) or 1
        if stages != self.pipeline.stages:
            return _differs("--pipeline-model-parallel-size", stages, self.pipeline.stages)
        if not (getattr(args, "vocab_size", None) or getattr(args, "padded_vocab_size", None)):
            # The tokenizer, which knows, is made later.
            args = Namespace(**{**vars(args), "padded_vocab_size": self.shape.vocabulary})
        try:
            mine = Shape.of(Gpt.of(args))
        except LayoutError as error:
            return str(error)
        if len(mine.experts) != len(self.shape.experts):
            return _differs("--num-layers", len(mine.experts), len(self.shape.experts))
        for key, (flag, _) in _ENTRIES.items():
            if (given := getattr(mine, key)) != (planned := getattr(self.shape, key)):
                return _differs(flag, given, planned)
        return None

    def unlike(self, config: Any) -> str | None:
        """Return the same for a model configuration of Megatron's, as far as it says what a model is."""
        experts = self.shape.expert_count
        for key, (_, attribute) in _ENTRIES.items():
            if attribute is None or (attribute.startswith("moe_") and not experts):
                continue
            if ((given := getattr(config, attribute, None)) or 0) != (planned := getattr(self.shape, key)):
                return _differs(attribute, given, planned)
        if experts and expert_layers(config.moe_layer_freq, len(self.shape.experts)) != self.shape.experts:
            return _differs("moe_layer_freq", config.moe_layer_freq, self.shape.experts)
        return None

    def other_vocabulary(self, padded: int) -> str | None:
        """Return the same for a vocabulary that is known only later."""
        planned = self.shape.vocabulary
        return None if padded == planned else _differs(_ENTRIES["vocabulary"][0], padded, planned)


def _differs(what: str, given: Any, planned: Any) -> str:
    return f"the plan is for {what} {_said(planned)}, not {_said(given)}: plan anew with the flags of this run"


def _said(value: Any) -> str:
    if isinstance(value, tuple):
        return "".join(str(int(one)) for one in value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
