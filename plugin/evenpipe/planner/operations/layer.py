"""A transformer layer: attention, whose core keeps its scores or not, and an MLP or experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from evenpipe.descriptions import Model
from evenpipe.planner.operations.operation import (
    Collective,
    Dispatch,
    FusedAttention,
    Gemm,
    Moved,
    Operation,
    Parameters,
    Shard,
    Split,
    Work,
)
from evenpipe.planner.run import Module

__all__ = ["attention", "attention_mask_bytes", "experts", "mlp", "softmax_is_fused"]


def attention(shard: Shard) -> list[Operation]:
    """Return the attention block of a layer, from its norm to its residual."""
    into, sizes = _latent(shard) if shard.model.latent else _grouped(shard)
    out = shard.model.heads * sizes[2] / shard.run.tensor
    e, n = shard.run.element_bytes, shard.tokens * out
    transposed = []
    if shard.run.attention == "unfused":  # fused kernels read and write the layout that linear layers have
        transposed = [Operation("core_attention.transposed", (Moved(2 * e * n),), (Moved(2 * e * n),))]
    found = [
        replace(shard.norm("input_norm"), module="layernorm"),
        *into,
        *_core(shard, *sizes),
        *transposed,
        shard.linear("projection", shard.model.hidden, out, "row"),
        shard.residual_add("projection.residual"),
    ]
    return [replace(one, graph="attn") for one in found]


def _behind_norm(
    shard: Shard, name: str, outputs: float, split: Split | None = "column", tokens: float | None = None
) -> Operation:
    """Return a linear layer whose input the layer's norm makes; what it quantizes of that is its own to keep."""
    of, kept = shard.model.hidden, shard.residual
    made = shard.linear(name, outputs, of, split, kept=kept, tokens=tokens, behind_norm=True)
    return made if shard.run.quantization else replace(made, source="layernorm")


def softmax_is_fused(shard: Shard) -> bool:
    """Return whether Megatron's fused softmax takes this shape (``fused_softmax.py``, ``is_kernel_available``)."""
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


def attention_mask_bytes(shard: Shard) -> float:
    """Return the bytes of the attention mask that a micro-batch keeps once for all layers of a part (Megatron's own).

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
    made = _behind_norm(shard, "qkv", width)
    n = shard.tokens * width
    normed = shard.tokens * (model.heads + model.key_value_heads) * model.head_dim / t
    return [
        made,
        *([shard.norm("qkv.norm", normed, model.head_dim)] if model.qk_norm else []),
        # Bias or rotation: read, written; the gradients are put together again.
        Operation("core_attention.rotation", (Moved(2 * e * n),), (Moved(3 * e * n, 2),), saved_bytes=e * n),
    ], (model.head_dim, model.key_value_heads / model.heads, model.head_dim)


def _latent(shard: Shard) -> tuple[list[Operation], Sizes]:
    """Queries, and keys with values, from low ranks (DeepSeek-V2 §2.1); the down-projections are on every rank.

    Approximated: norms and rotations of the low ranks are counted as one, and what is absorbed in inference is not.
    """
    model, t, e = shard.model, shard.run.tensor, shard.run.element_bytes
    latent = model.latent
    assert latent is not None
    up: Final = "mla_up_proj"
    a = model.heads / t
    key = latent.plain_dim + latent.rotary_dim
    down = latent.query_rank + latent.key_value_rank + latent.rotary_dim
    of_down = shard.tokens / (t if shard.run.sequence_parallel else 1)
    n = shard.tokens * a * (2 * key + latent.value_dim)
    if latent.query_rank:
        queries = shard.linear("qkv.queries", a * key, latent.query_rank)
    else:  # from the hidden state, as the down-projection, which keeps it for both unless each quantizes its own
        queries = _behind_norm(shard, "qkv.queries", a * key)
        queries = queries if shard.run.quantization else replace(queries, saved_bytes=0, source=None)
    return [
        _behind_norm(shard, "qkv.down", down, None, tokens=of_down),
        shard.norm("qkv.norm", of_down * down, down),
        replace(queries, module=up),
        replace(
            shard.linear("qkv.keys_values", a * (latent.plain_dim + latent.value_dim), latent.key_value_rank), module=up
        ),
        Operation(
            "core_attention.rotation",
            (Moved(2 * e * n, 4),),
            (Moved(3 * e * n, 5),),
            saved_bytes=e * n,
            module=up,
            source=up,
        ),
    ], (key, 1.0, latent.value_dim)


def _seen(model: Model) -> float:
    """Return the share of all pairs of tokens that fused attention computes, in the mean of layers with a window or
    chunks and layers without.
    """
    whole = 0.5 if model.causal else 1.0
    if model.chunk:
        return whole * (3 * min(1.0, model.chunk / model.sequence) + 1) / 4
    return (whole + min(whole, model.window / model.sequence)) / 2 if model.window else whole


def _core(shard: Shard, key: float, shared: float, value: float) -> list[Operation]:
    """Scores, softmax, dropout and context; selective recomputation does these again."""
    model, run, e = shard.model, shard.run, shard.run.element_bytes
    length, queries, heads = model.sequence, model.sequence / run.context, model.heads / run.tensor * run.micro_batch
    core: Final = "core_attn"
    exchanged: list[Work] = []
    if run.context > 1:
        # Keys and values of the others come by while own queries are computed with (ring attention), and what each
        # step gives is added in fp32: the sum read and written, the step's part read, with their sums of rows.
        nbytes = e * (run.context - 1) * shard.tokens * model.heads / run.tensor * shared * (key + value)
        added = 24 * (run.context - 1) * queries * heads * value
        exchanged = [
            Collective(nbytes, "context", Gemm(queries, length, key, heads)),
            Moved(added, 3 * (run.context - 1)),
        ]
    if run.attention == "flash":
        frozen = run.lora_rank > 0 and "linear_proj" not in run.lora_modules
        flops = 2 * queries * length * (key + value) * heads * _seen(model)
        # Backward computes the scores again (FlashAttention-2 §3.1): five products where forward has two. It adds the
        # queries' gradient up in fp32 beside a number a row, and has gradients of keys and values for each head of
        # queries, before those that share them are summed (`mha_bwd` of flash-attn 2).
        scratch = queries * heads * (4 * key + 4)
        if shared < 1:
            scratch += e * length * heads * (key + value)
        return [
            Operation(
                "core_attention.fused",
                (FusedAttention(flops, key, False), *exchanged),
                (FusedAttention(2.5 * flops, key, True), *exchanged, *exchanged),
                # The logarithm of each row's sum; and its output, unless that is kept as the projection's input.
                saved_bytes=(4 + (e * value if run.quantization or frozen else 0)) * queries * heads,
                scratch_bytes=scratch,
                module=core,
                source=core,
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
        Operation(
            "core_attention.scores", (products[0], *exchanged), (products[1], products[1], *exchanged), module=core
        ),
        Operation(
            "core_attention.softmax",
            softmax,
            of_softmax,
            # In fp32 for the backward, and, where nothing is dropped, cast for the context's product.
            saved_bytes=((e if fused else 4) + (0 if fused or model.dropout or e == 4 else e)) * scores,
            scratch_bytes=(e if fused else 10) * scores,
            module=core,
            source=core,
        ),
        Operation(
            # What the product with the values takes, and a mask of one byte.
            "core_attention.dropout",
            drop,
            drop,
            saved_bytes=(e + 1) * scores if model.dropout else 0,
            module=core,
            source=core,
        ),
        Operation("core_attention.context", (products[1],), products, module=core),
    ]


def mlp(shard: Shard) -> list[Operation]:
    """Return the MLP block of a layer, from its norm to its residual."""
    found = [
        replace(shard.norm("mlp_norm"), module="layernorm"),
        *_two_layers(shard, shard.model.ffn / shard.run.tensor, "mlp"),
        shard.residual_add("fc2.residual"),
    ]
    return [replace(one, graph="mlp") for one in found]


def _two_layers(shard: Shard, inner: float, module: Module, prefix: str = "") -> list[Operation]:
    """Their input is the module's, which is kept where the module is carried out again."""
    ways = 2 if shard.model.gated else 1
    return [
        replace(_behind_norm(shard, f"{prefix}fc1", ways * inner), module=module),
        replace(_activation(shard, f"{prefix}activation", shard.tokens * inner, ways), module=module, source=module),
        replace(shard.linear(f"{prefix}fc2", shard.model.hidden, inner, "row"), module=module, source=module),
    ]


def _activation(shard: Shard, name: str, elements: float, ways: int) -> Operation:
    """GELU with its bias, or of a gated MLP the product with the gate: all of the input is kept, gate included."""
    e = shard.run.element_bytes
    return Operation(
        name,
        (Moved((ways + 1) * e * elements),),
        (Moved((2 * ways + 2) * e * elements, 2),),
        saved_bytes=ways * e * elements,
    )


def experts(shard: Shard) -> list[Operation]:
    """Return the experts of a layer, their router, and the ways to them and back, on the rank with the most tokens.

    Each rank has count / ep experts, whose matrices are divided among `expert_ways` ranks. Every token goes to
    ``chosen`` of them by an all-to-all over the expert-parallel ranks.
    """
    model, run, e = shard.model, shard.run, shard.run.element_bytes
    chosen = model.experts
    assert chosen is not None
    own = chosen.count / run.expert
    routed = shard.tokens * chosen.chosen * run.expert_ways / run.tensor * run.fullest
    inner, ways = chosen.ffn / run.expert_ways, 2 if model.gated else 1
    part = shard.residual * chosen.chosen  # of tokens that this rank gives away
    limit = chosen.chosen_groups if chosen.groups > 1 else None
    exchanged = (Dispatch(e * shard.residual, chosen.chosen, limit),) if run.expert > 1 else ()
    # Read and written, by HybridEP's own kernels in a graph, or by three that sort, count and copy.
    within = run.dispatcher == "hybridep" and "full_iteration" in run.graphs
    moved = Moved(e * part, 1) if within else Moved(2 * e * part, 3)
    gates = shard.residual / model.hidden * chosen.count
    shared = (
        _two_layers(shard, chosen.shared_ffn / run.tensor, "shared_experts", "shared_") if chosen.shared_ffn else []
    )
    if shared and run.quantization is None:  # the router keeps the same
        shared[0] = replace(shared[0], saved_bytes=0)
    of_experts: Final = "moe"
    return [
        replace(shard.norm("mlp_norm"), module="layernorm", graph="moe_router"),
        Operation(
            "router",
            (Gemm(shard.residual / model.hidden, chosen.count, model.hidden), Moved(16 * gates, 6)),
            (Gemm(shard.residual / model.hidden, model.hidden, chosen.count), Moved(16 * gates, 6)),
            (Gemm(model.hidden, chosen.count, shard.residual / model.hidden),),
            Parameters(chosen.count * (model.hidden + model.biases)),
            saved_bytes=e * shard.residual + 8 * gates,
            module=of_experts,
            source="layernorm",
            graph="moe_router",
        ),
        Operation(
            "experts.dispatch",
            (moved, *exchanged),
            (moved, *exchanged),
            saved_bytes=8 * routed / run.expert_ways,
            module=of_experts,
            source=of_experts,
        ),
        replace(_expert_products(shard, "experts.fc1", own, routed, ways * inner, model.hidden), source=of_experts),
        _expert_activation(shard, routed * inner, ways),
        replace(_expert_products(shard, "experts.fc2", own, routed, model.hidden, inner), source="moe_act"),
        *_expert_biases(shard, routed * (ways * inner + model.hidden), own),
        Operation("experts.combine", (*exchanged, moved), (*exchanged, moved), module=of_experts, source=of_experts),
        *shared,
        shard.residual_add("experts.residual"),
    ]


def _expert_products(shard: Shard, name: str, own: float, routed: float, outputs: float, inputs: float) -> Operation:
    """One matrix product an expert, of its part of the ``routed`` tokens, with a bias for each output."""
    m, narrow = routed / own, shard.run.quantization
    each = 1 if shard.run.fused_experts else own
    casts = each if narrow is None or narrow.by_expert else min(each, 2)
    made, of_input, of_weight = (
        Gemm(*sizes, own, narrow is not None, each)
        for sizes in ((m, outputs, inputs), (m, inputs, outputs), (inputs, outputs, m))
    )
    t = shard.run.expert_ways
    half = Collective((t - 1) / t * shard.run.element_bytes * routed * shard.model.hidden, "tensor")
    collected = (half,) if t > 1 else ()
    trained = not shard.run.lora_rank
    return Operation(
        name,
        (*shard.casts(routed * inputs, narrow, times=casts), made, *collected),
        (*shard.casts(routed * outputs, narrow, times=casts), of_input, *collected),
        (of_weight,) if trained else (),
        Parameters(0, own * (outputs * inputs + (outputs if shard.model.biases else 0))),
        saved_bytes=shard.run.operand_bytes(made.quantized) * routed * inputs if trained else 0,
        module="moe",
    )


#: Bytes an element that biases and a clamped gate of experts move forward: by kernels of each expert, or one. Set on
#: the three iterations of GPT-OSS among `benchmarks/published/recipes.yaml`.
_BIASED: Final = (50.0, 15.0)


def _expert_biases(shard: Shard, elements: float, own: float) -> list[Operation]:
    """Return the biases of experts, where they have some, which no product's kernel adds."""
    if not (shard.model.biases and shard.model.gated):
        return []
    fused = shard.run.fused_experts
    nbytes, kernels = _BIASED[fused] * elements, 2 if fused else 6 * own
    return [Operation("experts.biases", (Moved(nbytes, kernels),), (Moved(2 * nbytes, kernels),), module="moe")]


def _expert_activation(shard: Shard, elements: float, ways: int) -> Operation:
    """`_activation`, of which fused products have half in their own kernels."""
    found = replace(_activation(shard, "experts.activation", elements, ways), module="moe_act", source="moe")
    if not shard.run.fused_experts:
        return found
    forward, backward = (
        tuple(work._replace(nbytes=work.nbytes / 2) if isinstance(work, Moved) else work for work in works)
        for works in (found.forward, found.backward)
    )
    return replace(found, forward=forward, backward=backward)
