"""The blocks of a model, what each part of a pipeline has of them, and what the model's ends have beside layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Final, Literal, NamedTuple

from evenpipe.descriptions import Model
from evenpipe.planner.operations.layer import attention, attention_mask_bytes, experts, mlp
from evenpipe.planner.operations.operation import Collective, Moved, Operation, Parameters, Shard, total
from evenpipe.planner.run import OffloadModule, Run

__all__ = ["Block", "Blocks", "Part", "Recomputed", "parts_of"]

Block = Literal[
    "embedding",
    "layer",
    "kept layer",
    "expert layer",
    "kept expert layer",
    "second embedding",
    "further token",
    "head",
    "tied head",
    "further head",
]
Part = Mapping[Block, int]
"""How many blocks of each kind a part of the pipeline has."""

#: Blocks that whole-layer recomputation carries out again, keeping their input.
_RECOMPUTED: Final = frozenset({"layer", "expert layer", "further token"})
_WITH_ATTENTION: Final = _RECOMPUTED | {"kept layer", "kept expert layer"}


def parts_of(model: Model, run: Run) -> list[Part]:
    """Each part of the pipeline, in the order of the model. MTP layers are in the last, unless the run says where.

    On another stage than the embedding's, they have an embedding of their own, as Megatron's have; a tied head's copy
    is one already. Their heads are with the model's own (`GPTModel._postprocess`, from megatron-core 0.14 on).
    """
    found: list[Counter[Block]] = []
    done = 0
    for layers in run.layers_of(model):
        again = layers if run.recomputed_layers is None else min(layers, run.recomputed_layers)
        first, end = done + again, done + layers
        experts, kept_experts = model.expert_layers(done, first), model.expert_layers(first, end)
        found.append(
            Counter(
                {
                    "layer": again - experts,
                    "expert layer": experts,
                    "kept layer": layers - again - kept_experts,
                    "kept expert layer": kept_experts,
                }
            )
        )
        done = end
    found[0]["embedding"] += 1
    found[-1]["tied head" if model.tied and run.stages == 1 else "head"] += 1
    if model.mtp_layers:
        where = len(found) - 1 if run.further_part is None else run.further_part
        found[where]["further token"] += model.mtp_layers
        found[-1]["further head"] += model.mtp_layers
        shared = where % run.stages == 0 or (model.tied and where == len(found) - 1)
        found[where]["second embedding"] += not shared
    return [+one for one in found]


class Blocks:
    """The operations of each kind of block on one GPU; ``like``: blocks of a run that only recomputes otherwise."""

    def __init__(self, model: Model, run: Run, like: Blocks | None = None) -> None:
        self.run = run
        self._shard = Shard(model, run)
        self._like = like

    @cached_property
    def operations(self) -> Mapping[Block, list[Operation]]:
        if self._like is not None:
            return self._like.operations
        shard = self._shard
        attended, dense = attention(shard), mlp(shard)
        found: dict[Block, list[Operation]] = {
            "embedding": embedding(shard),
            "layer": attended + dense,
            "kept layer": attended + dense,
            "second embedding": embedding(shard, positions=False),
            "head": head(shard, True),
            "tied head": head(shard, False),
            "further head": logits(shard, False),
        }
        last = dense
        if shard.model.experts is not None:
            last = experts(shard)
            found |= {"expert layer": attended + last, "kept expert layer": attended + last}
        return found | {"further token": [*joined(shard), *attended, *last, shard.norm("final_norm")]}

    @cached_property
    def parameters(self) -> Mapping[Block, Parameters]:
        """The parameters that one GPU has of each block."""
        if self._like is not None:
            return self._like.parameters
        return {block: total(operations) for block, operations in self.operations.items()}

    @cached_property
    def left_bytes(self) -> Mapping[Block, float]:
        """Bytes that the input gradient of each block leaves for its weight gradient, recomputed or not."""
        if self._like is not None:
            return self._like.left_bytes
        return {block: sum(one.left_bytes(self.run) for one in ones) for block, ones in self.operations.items()}

    def attention_mask_bytes(self, part: Part) -> float:
        """Return what all layers of the part together keep of a micro-batch's mask."""
        return attention_mask_bytes(self._shard) if any(kind in _WITH_ATTENTION for kind in part) else 0

    def recomputed(self, block: Block) -> Recomputed:
        """Return the block's operations that run again before its backward, and the bytes that it keeps until then."""
        operations = self.operations[block]
        if self.run.recompute == "full" and block in _RECOMPUTED:
            return Recomputed(operations, self.run.element_bytes * self._shard.residual, operations)
        again = self.run.again
        return Recomputed(
            [one for one in operations if one.module in again],
            sum(one.saved_bytes for one in operations if one.source not in again),
            [one for one in operations if one.source in again],
        )

    def offloaded(self, block: Block) -> float:
        """Return the bytes of the block that wait on the host; none of what is not kept."""
        run = self.run
        if not run.offload_modules or (run.recompute == "full" and block in _RECOMPUTED):
            return 0.0
        names = {name for module in run.offload_modules for name in _INPUTS[module]}
        kept = (one for one in self.operations[block] if one.name in names and one.source not in run.again)
        return run.offload_fraction * sum(one.saved_bytes for one in kept)


class Recomputed(NamedTuple):
    """``operations``: carried out again; ``kept_bytes``: of the block, from its forward to its backward.

    regained: whose bytes are not kept, and there again before its backward.
    """

    operations: list[Operation]
    kept_bytes: float
    regained: list[Operation]


#: The operations that keep a module's input.
_INPUTS: Final[Mapping[OffloadModule, tuple[str, ...]]] = {
    "attn_norm": ("input_norm",),
    "qkv_linear": ("qkv", "qkv.down", "qkv.queries"),
    "core_attn": ("core_attention.rotation",),
    "attn_proj": ("projection",),
    "mlp_norm": ("mlp_norm",),
    "expert_fc1": ("experts.fc1",),
    "moe_act": ("experts.activation",),
}
_OF_A_TOKEN = 17  # the loss keeps its label, whether that is another rank's, and its weight and loss in fp32


def embedding(shard: Shard, positions: bool = True) -> list[Operation]:
    """Rows of the vocabulary and positions, and dropout; the gradient is added into the rows.

    Each tensor-parallel rank has a part of the vocabulary: what it lacks comes by an all-reduce, or, where the sequence
    is divided, a reduce-scatter, whose gradient is gathered.
    """
    model, run, n = shard.model, shard.run, shard.residual
    e = run.element_bytes
    learned = positions and model.positions == "learned"
    count = model.vocabulary * model.hidden / run.tensor
    count += (model.max_positions or model.sequence) * model.hidden if learned else 0
    mask, indices = int(model.dropout), 1 + learned
    moved = Moved((3 * e + mask) * n, 3)
    summed, gathered = shard.collectives("row", shard.hidden)
    return [
        Operation(
            "embedding",
            (moved, *summed),
            () if run.lora_rank else (moved, *gathered),
            (),
            Parameters(count),
            mask * n + 8 * indices * shard.tokens,
        )
    ]


def head(shard: Shard, copies_embedding: bool) -> list[Operation]:
    """Return the last norm and `logits`; before it a BERT has a linear layer of its own."""
    before = [] if shard.model.causal else _masked_head(shard)
    return [*before, shard.norm("final_norm"), *logits(shard, copies_embedding)]


def logits(shard: Shard, copies_embedding: bool) -> list[Operation]:
    """Return the logits, and the loss in fp32: a copy, maximum, difference, exponential and sum of each row.

    copies_embedding: the matrix is here, and not on the stage of the embedding, or its own. Tensor-parallel ranks have
    a part of each row: its maximum, sum and wanted logit are reduced among them. All in place of the copy, as Megatron
    has it since 2020 (`cross_entropy.py`), but the gradient in half precision.
    """
    model, e, width = shard.model, shard.run.element_bytes, shard.model.vocabulary / shard.run.tensor
    product = shard.linear("output_layer", width, model.hidden, "column", kept=shard.residual, quantized=False)
    n = shard.tokens * width
    count = width * model.hidden if copies_embedding else 0
    count += 0 if model.causal else width  # BERT's biases
    loss = Operation(
        "cross_entropy",
        (Moved((e + 4 + 4 + 8 + 8 + 4) * n, 5), *shard.reduced_rows(3)),
        (Moved(22 * n, 3),),
        saved_bytes=4 * n + _OF_A_TOKEN * shard.tokens,
        scratch_bytes=e * n if e < 4 else 0,
    )
    return [replace(product, parameters=Parameters(count)), loss]


def _masked_head(shard: Shard) -> list[Operation]:
    """BERT's: behind the last layer's norm a linear layer and GELU before the head's own."""
    e, n, h = shard.run.element_bytes, shard.residual, shard.model.hidden
    made = shard.linear("transform", h, h, tokens=n / h, kept=n, quantized=False)
    return [
        shard.norm("transform_norm"),
        made,
        Operation("transform.activation", (Moved(2 * e * n),), (Moved(4 * e * n, 2),), saved_bytes=e * n),
    ]


def joined(shard: Shard) -> list[Operation]:
    """Before the layer that predicts a further token: its embedding joined with the hidden state (DeepSeek-V3 §2.2).

    Each tensor-parallel rank makes some columns of the result, which are then gathered (`eh_proj`).
    """
    h, t = shard.model.hidden, shard.run.tensor
    product = shard.linear("joining", h / t, 2 * h, "column", kept=2 * shard.residual, quantized=False)
    columns = Collective((t - 1) / t * shard.run.element_bytes * shard.hidden, "tensor")
    return [
        shard.norm("embedding_norm"),
        shard.norm("hidden_norm"),
        replace(
            product,
            forward=(*product.forward, *([columns] if t > 1 else [])),
            parameters=Parameters(2 * h * h / t),
        ),
    ]
