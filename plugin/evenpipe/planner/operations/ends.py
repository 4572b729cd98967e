"""What the ends of a model have beside layers: embedding, head and loss, and further tokens' layers."""

from __future__ import annotations

from evenpipe.planner.operations.operation import Gemm, Moved, Operation, Parameters
from evenpipe.planner.operations.shard import Shard

__all__ = ["embedding", "head", "joined"]

_OF_A_TOKEN = 17  # the loss keeps its label, whether that is another rank's, and its weight and loss in fp32


def embedding(shard: Shard, positions: bool = True) -> list[Operation]:
    """Rows of the vocabulary and positions, and dropout; the gradient is added into the rows.

    Each tensor-parallel rank has a part of the vocabulary: what it lacks comes by an all-reduce, or, where the sequence
    is divided, a reduce-scatter, whose gradient is gathered.
    """
    model, e, n = shard.model, shard.run.element_bytes, shard.residual
    count = model.vocabulary * model.hidden / shard.run.tensor
    count += model.sequence * model.hidden if positions and model.positions == "learned" else 0
    mask, indices = int(model.dropout), 1 + (positions and model.positions == "learned")
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
