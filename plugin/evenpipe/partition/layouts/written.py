"""A layout as `evenpipe partition --megatron --out` wrote it: read again, and compared with a run it is given to."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evenpipe.partition.layouts.plan import FORMAT, StagePlan
from evenpipe.partition.layouts.shape import LayoutError, Pipeline, Shape, laid_out_by
from evenpipe.planner.arguments import expert_layers

__all__ = ["WrittenLayout"]

_FLAGS: Final = {
    "tensor_parallel": "--tensor-model-parallel-size",
    "context_parallel": "--context-parallel-size",
    "expert_parallel": "--expert-model-parallel-size",
    "expert_tensor_parallel": "--expert-tensor-parallel-size",
    "sequence_parallel": "--sequence-parallel",
    "hidden": "--hidden-size",
    "heads": "--num-attention-heads",
    "groups": "--num-query-groups",
    "head_size": "--kv-channels",
    "ffn": "--ffn-hidden-size",
    "gated": "--swiglu",
    "bias": "--add-bias-linear",
    "norm_bias": "biases of --normalization",
    "sequence": "--seq-length",
    "micro_batch": "--micro-batch-size",
    "vocabulary": "padded --vocab-size",
    "positions": "learned positions of --max-position-embeddings",
    "tied": "tied embeddings",
    "experts": "layers of experts by --moe-layer-freq",
    "expert_count": "--num-experts",
    "top_k": "--moe-router-topk",
    "expert_ffn": "--moe-ffn-hidden-size",
    "shared_ffn": "--moe-shared-expert-intermediate-size",
    "mtp": "--mtp-num-layers",
    "precision": "precision",
    "recompute": "--recompute-granularity",
}
"""What a plan is for; replicas, and what they share of an optimizer, do not matter to a layout."""

_CONFIGURED: Final = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "groups": "num_query_groups",
    "head_size": "kv_channels",
    "ffn": "ffn_hidden_size",
    "gated": "gated_linear_unit",
    "tensor_parallel": "tensor_model_parallel_size",
    "context_parallel": "context_parallel_size",
    "expert_parallel": "expert_model_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "mtp": "mtp_num_layers",
    "expert_count": "num_moe_experts",
}
"""As attributes of a TransformerConfig; Megatron itself compares its numbers of layers and stages with the layout."""

_CONFIGURED_EXPERTS: Final = {
    "top_k": "moe_router_topk",
    "expert_ffn": "moe_ffn_hidden_size",
    "shared_ffn": "moe_shared_expert_intermediate_size",
}
"""The same, which say something of a model with experts alone."""

_VIRTUAL: Final = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


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
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "document"
            raise LayoutError(
                f"{path}: no layout that `evenpipe partition --megatron --out` wrote: {where}: {first['msg']}"
            ) from None

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
            mine = Shape.of(args)
        except LayoutError as error:
            return str(error)
        if len(mine.experts) != len(self.shape.experts):
            return _differs("--num-layers", len(mine.experts), len(self.shape.experts))
        for field, what in _FLAGS.items():
            if (given := getattr(mine, field)) != (planned := getattr(self.shape, field)):
                return _differs(what, given, planned)
        return None

    def unlike(self, config: Any) -> str | None:
        """The same for a model configuration of Megatron's, as far as it says what a model is."""
        experts = self.shape.expert_count
        for field, attribute in {**_CONFIGURED, **(_CONFIGURED_EXPERTS if experts else {})}.items():
            if ((given := getattr(config, attribute, None)) or 0) != (planned := getattr(self.shape, field)):
                return _differs(attribute, given, planned)
        if experts and expert_layers(config.moe_layer_freq, len(self.shape.experts)) != self.shape.experts:
            return _differs("moe_layer_freq", config.moe_layer_freq, self.shape.experts)
        return None

    def other_vocabulary(self, padded: int) -> str | None:
        """The same for a vocabulary that is known only later."""
        planned = self.shape.vocabulary
        return None if padded == planned else _differs(_FLAGS["vocabulary"], padded, planned)


def _differs(what: str, given: Any, planned: Any) -> str:
    return f"the plan is for {what} {_said(planned)}, not {_said(given)}: plan anew with the flags of this run"


def _said(value: Any) -> str:
    if isinstance(value, tuple):
        return "".join(str(int(one)) for one in value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
