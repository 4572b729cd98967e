"""Attention: projections, and the core that keeps or does not keep its scores."""

from __future__ import annotations

from evenpipe.planner.operations.operation import Collective, FusedAttention, Gemm, Moved, Operation
from evenpipe.planner.operations.shard import Shard

__all__ = ["attention", "mask_bytes", "softmax_is_fused"]


def attention(shard: Shard) -> list[Operation]:
    """The attention block of a layer, from its norm to its residual."""
    into, sizes = _latent(shard) if shard.model.latent else _grouped(shard)
    out = shard.model.heads * sizes[2] / shard.run.tensor
    e, n = shard.run.element_bytes, shard.tokens * out
    return [
        shard.norm("norm of attention"),
        *into,
        *_core(shard, *sizes),
        Operation("transposed context", (Moved(2 * e * n),), (Moved(2 * e * n),)),
        shard.linear("projection", shard.model.hidden, out, "row"),
        shard.residual_add("residual of attention"),
    ]


def softmax_is_fused(shard: Shard) -> bool:
    """Whether Megatron's fused softmax takes this shape (``fused_softmax.py``, ``is_kernel_available``)."""
    run, model = shard.run, shard.model
    rows = run.micro_batch * model.heads // run.tensor
    length = model.sequence // run.context
    return (
        run.fused_softmax
        and run.precision != "fp32"
        and rows % 4 == 0
        and length % 4 == 0
        and 16 < model.sequence <= 16384
    )


def mask_bytes(shard: Shard) -> float:
    """Of the mask that a micro-batch keeps, once for all layers of a part, with Megatron's own attention.

    BERT's is its own, and an input of what is carried out again; a causal one is the unfused softmax's only.
    """
    run, model = shard.run, shard.model
    of_one = model.sequence / run.context * model.sequence
    if run.attention == "flash":
        return 0
    if not model.causal:
        return run.micro_batch * of_one
    return of_one if run.recompute == "none" and not softmax_is_fused(shard) else 0


Sizes = tuple[float, float, float]
"""Of a head: elements of a query or key, heads of keys and values over heads of queries, elements of a value."""


def _grouped(shard: Shard) -> tuple[list[Operation], Sizes]:
    """Queries, keys and values by one matrix; with as many keys and values as queries this is multi-head attention."""
    model, t, e = shard.model, shard.run.tensor, shard.run.element_bytes
    width = (model.heads + 2 * model.key_value_heads) * model.head_dim / t
    made = shard.linear("queries, keys, values", width, model.hidden, "column", kept=shard.residual)
    n = shard.tokens * width
    return [
        made,
        # Bias or rotation: read, written; the gradients are put together again.
        Operation("bias or rotation", (Moved(2 * e * n),), (Moved(3 * e * n, 2),), saved_bytes=e * n),
    ], (model.head_dim, model.key_value_heads / model.heads, model.head_dim)


def _latent(shard: Shard) -> tuple[list[Operation], Sizes]:
    """Queries, and keys with values, from low ranks (DeepSeek-V2 §2.1); the down-projections are on every rank.

    Approximated: norms and rotations of the low ranks are counted as one, and what is absorbed in inference is not.
    """
    model, t, e = shard.model, shard.run.tensor, shard.run.element_bytes
    latent = model.latent
    assert latent is not None
    a = model.heads / t
    key = latent.plain_dim + latent.rotary_dim
    down = latent.query_rank + latent.key_value_rank + latent.rotary_dim
    of_down = shard.tokens / (t if shard.run.sequence_parallel else 1)
    n = shard.tokens * a * (2 * key + latent.value_dim)
    return [
        shard.linear("down", down, model.hidden, tokens=of_down, kept=shard.residual),
        shard.norm("norm of ranks", of_down * down, down),
        shard.linear("queries", a * key, latent.query_rank),
        shard.linear("keys, values", a * (latent.plain_dim + latent.value_dim), latent.key_value_rank),
        Operation("rotation", (Moved(2 * e * n),), (Moved(3 * e * n, 2),), saved_bytes=e * n),
    ], (key, 1.0, latent.value_dim)


def _core(shard: Shard, key: float, shared: float, value: float) -> list[Operation]:
    """Scores, softmax, dropout and context; selective recomputation does these again."""
    model, run, e = shard.model, shard.run, shard.run.element_bytes
    length, queries, heads = model.sequence, model.sequence / run.context, model.heads / run.tensor * run.micro_batch
    exchanged = []
    if run.context > 1:
        # Keys and values of the others come by while own queries are computed with (ring attention).
        nbytes = e * (run.context - 1) * shard.tokens * model.heads / run.tensor * shared * (key + value)
        exchanged = [Collective(nbytes, "context", Gemm(queries, length, key, heads))]
    if run.attention == "flash":
        flops = 2 * queries * length * (key + value) * heads * (0.5 if model.causal else 1)
        # Backward computes the scores again (FlashAttention-2 §3.1): five products where forward has two. It adds the
        # queries' gradient up in fp32 beside a number a row, and has gradients of keys and values for each head of
        # queries, before those that share them are summed (`mha_bwd` of flash-attn 2).
        scratch = queries * heads * (4 * key + 4)
        if shared < 1:
            scratch += e * length * heads * (key + value)
        return [
            Operation(
                "fused attention",
                (FusedAttention(flops, False), *exchanged),
                (FusedAttention(2.5 * flops, True), *exchanged, *exchanged),
                saved_bytes=4 * queries * heads,  # the logarithm of each row's sum
                scratch_bytes=scratch,
                core=True,
            )
        ]
    scores = queries * length * heads
    fused = softmax_is_fused(shard)
    # Read and written once, with the causal mask within. What is not fused masks, casts to fp32 and back, and computes
    # in fp32: 36 bytes an element forward, 48 backward, counted from PyTorch's kernels in `forward_torch_softmax`.
    softmax = (Moved(2 * e * scores),) if fused else (Moved(36 * scores, 5, unfused=True),)
    of_softmax = (Moved(3 * e * scores),) if fused else (Moved(48 * scores, 6, unfused=True),)
    products = Gemm(queries, length, key, heads), Gemm(queries, value, length, heads)
    dropped = Moved((2 * e + 1) * scores) if model.dropout else None
    drop = () if dropped is None else (dropped,)
    return [
        Operation("scores", (products[0], *exchanged), (products[1], products[1], *exchanged), core=True),
        Operation(
            "softmax",
            softmax,
            of_softmax,
            # In fp32 for the backward, and, where nothing is dropped, cast for the context's product.
            saved_bytes=((e if fused else 4) + (0 if fused or model.dropout or e == 4 else e)) * scores,
            scratch_bytes=(e if fused else 10) * scores,
            core=True,
        ),
        Operation("dropout", drop, drop, saved_bytes=(e + 1) * scores if model.dropout else 0, core=True),
        Operation("context", (products[1],), products, core=True),
    ]
