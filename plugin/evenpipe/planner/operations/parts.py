"""The blocks of a model, what each part of a pipeline has of them, and what the model's ends have beside layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Final, Literal, NamedTuple

from evenpipe.planner.descriptions import Model
from evenpipe.planner.operations.layer import attention, experts, mask_bytes, mlp
from evenpipe.planner.operations.operation import Gemm, Moved, Operation, Parameters, Shard
from evenpipe.planner.run import Run

__all__ = ["Block", "Blocks", "Part", "embedding", "head", "joined", "parts_of"]

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
    """Each part of the pipeline, in the order of the model. What MTP adds is with the last, unless the run says where.

    Where that is another stage than the embedding's, it has an embedding of its own, as Megatron's has; a tied head's
    copy is one already.
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
        found[where]["further head"] += model.mtp_layers
        shared = where % run.stages == 0 or (model.tied and where == len(found) - 1)
        found[where]["second embedding"] += not shared
    return [+one for one in found]


class Blocks:
    """The operations of each kind of block on one GPU."""

    def __init__(self, model: Model, run: Run) -> None:
        self.run = run
        shard = Shard(model, run)
        self._shard = shard
        last = experts if model.experts else mlp
        self._made: Mapping[Block, Callable[[], list[Operation]]] = {
            "embedding": lambda: embedding(shard),
            "layer": lambda: attention(shard) + mlp(shard),
            "kept layer": lambda: attention(shard) + mlp(shard),
            "expert layer": lambda: attention(shard) + experts(shard),
            "kept expert layer": lambda: attention(shard) + experts(shard),
            "second embedding": lambda: embedding(shard, positions=False),
            "further token": lambda: joined(shard) + attention(shard) + last(shard),
            "head": lambda: head(shard, True),
            "tied head": lambda: head(shard, False),
            "further head": lambda: head(shard, False),
        }

    @cached_property
    def operations(self) -> Mapping[Block, list[Operation]]:
        with_experts = self._shard.model.experts is not None
        return {kind: make() for kind, make in self._made.items() if with_experts or "expert" not in kind}

    def mask_bytes(self, part: Part) -> float:
        """What all layers of the part together keep of a micro-batch's mask."""
        return mask_bytes(self._shard) if any(kind in _WITH_ATTENTION for kind in part) else 0

    def recomputed(self, block: Block) -> Recomputed:
        """What of the block is carried out again before its backward, and what it keeps until then."""
        operations = self.operations[block]
        if self.run.recompute == "full" and block in _RECOMPUTED:
            kept = self.run.element_bytes * self._shard.residual
            return Recomputed(operations, kept)
        selective = self.run.recompute == "selective"
        again = [one for one in operations if one.core and selective]
        return Recomputed(again, sum(one.saved_bytes for one in operations if not (one.core and selective)))


class Recomputed(NamedTuple):
    """``operations``: carried out again; ``kept_bytes``: of the block, from its forward to its backward."""

    operations: list[Operation]
    kept_bytes: float


_OF_A_TOKEN = 17  # the loss keeps its label, whether that is another rank's, and its weight and loss in fp32


def embedding(shard: Shard, positions: bool = True) -> list[Operation]:
    """Rows of the vocabulary and positions, and dropout; the gradient is added into the rows.

    Each tensor-parallel rank has a part of the vocabulary: what it lacks comes by an all-reduce, or, where the sequence
    is divided, a reduce-scatter, whose gradient is gathered.
    """
    model, e, n = shard.model, shard.run.element_bytes, shard.residual
    learned = positions and model.positions == "learned"
    count = model.vocabulary * model.hidden / shard.run.tensor
    count += (model.max_positions or model.sequence) * model.hidden if learned else 0
    mask, indices = int(model.dropout), 1 + learned
    moved = Moved((3 * e + mask) * n, 3)
    summed, gathered = shard.collectives("row")
    return [
        Operation(
            "embedding",
            (moved, *summed),
            (moved, *gathered),
            (),
            Parameters(count),
            mask * n + 8 * indices * shard.tokens,
        )
    ]


def head(shard: Shard, copies_embedding: bool) -> list[Operation]:
    """The last norm, the logits, and the loss in fp32: a copy, maximum, difference, exponential and sum of each row.

    copies_embedding: the matrix is here, and not on the stage of the embedding, or its own. Tensor-parallel ranks have
    a part of each row: its maximum, sum and wanted logit are reduced among them. All in place of the copy, as Megatron
    has it since 2020 (`cross_entropy.py`), but the gradient in half precision.
    """
    model, e = shard.model, shard.run.element_bytes
    made = shard.linear("logits", model.vocabulary / shard.run.tensor, model.hidden, "column", kept=shard.residual)
    n = shard.tokens * model.vocabulary / shard.run.tensor
    count = model.vocabulary * model.hidden / shard.run.tensor if copies_embedding else 0
    count += 0 if model.causal else model.vocabulary / shard.run.tensor  # BERT's biases
    logits = Operation(
        made.name, made.forward, made.backward, made.weight_gradient, Parameters(count), made.saved_bytes
    )
    loss = Operation(
        "loss",
        (Moved((e + 4 + 4 + 8 + 8 + 4) * n, 5), *shard.reduced_rows(3)),
        (Moved(22 * n, 3),),
        saved_bytes=4 * n + _OF_A_TOKEN * shard.tokens,
        scratch_bytes=e * n if e < 4 else 0,
    )
    before = [] if model.causal else _masked_head(shard)
    return [*before, shard.norm("last norm"), logits, loss]


def _masked_head(shard: Shard) -> list[Operation]:
    """BERT's: behind the last layer's norm a linear layer and GELU before the head's own."""
    e, n, h = shard.run.element_bytes, shard.residual, shard.model.hidden
    made = shard.linear("transform", h, h, tokens=n / h, kept=n)
    return [
        shard.norm("norm before transform"),
        made,
        Operation("activation of head", (Moved(2 * e * n),), (Moved(4 * e * n, 2),), saved_bytes=e * n),
    ]


def joined(shard: Shard) -> list[Operation]:
    """Before the layer that predicts a further token: its embedding joined with the hidden state (DeepSeek-V3 §2.2)."""
    h, n = shard.model.hidden, shard.residual
    of = Gemm(n / h, h, 2 * h)
    return [
        shard.norm("norm of embedding"),
        shard.norm("norm of hidden state"),
        Operation(
            "joined",
            (of,),
            (Gemm(n / h, 2 * h, h),),
            (Gemm(2 * h, h, n / h),),
            Parameters(2 * h * h),
            saved_bytes=2 * shard.run.element_bytes * n,
        ),
    ]
