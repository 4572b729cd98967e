"""What every node of a Megatron GPT computes, moves and keeps: its layers' own structure, written down node by node."""

from __future__ import annotations

from typing import Final, NamedTuple

from evenpipe.partition.layouts.shape import Shape

__all__ = ["SECOND_HALF", "Work", "kind_of_layer", "kinds", "work_of"]

#: The first node of a transformer layer that is not of its attention.
SECOND_HALF: Final = "mlp_norm"
_BACKWARD: Final = 2.0  # a matrix product has two in its backward
_BACKWARD_OF_CORE: Final = 2.5  # FlashAttention computes the scores anew: five products for two (Dao 2022, App. B)
_SINGLE: Final = 4
_INDEX: Final = 8


class Work(NamedTuple):
    """A node's work for one micro-batch on one rank, with a fused (flash) attention and without dropout.

    `flops` and `moved_bytes` of its forward, `backward` times as much in its backward. `saved_bytes` stay until the
    backward. `parameters` are the layer's own, `expert_parameters` those of experts, `words` a copy of the word
    embeddings, which a stage has once, however many of its nodes use it.
    """

    name: str
    flops: float = 0.0
    moved_bytes: float = 0.0
    saved_bytes: float = 0.0
    parameters: float = 0.0
    expert_parameters: float = 0.0
    words: float = 0.0
    backward: float = _BACKWARD


def kind_of_layer(experts: bool) -> str:
    return "experts" if experts else "dense"


def kinds(shape: Shape) -> tuple[str, ...]:
    """The kinds of layers that the model has, in the order of their first."""
    layers = dict.fromkeys(map(kind_of_layer, shape.experts))
    return ("embedding", *layers, *(("mtp",) if shape.mtp else ()), "loss")


def work_of(shape: Shape, kind: str) -> tuple[Work, ...]:
    """The nodes of a layer of `kind`, in order; "mtp" is all of the MTP layers, "loss" has a head for each of them."""
    if kind == "embedding":
        return (_embedding(shape),)
    if kind == "loss":
        return _loss(shape)
    if kind == "mtp":
        one = _mtp(shape)
        return tuple(node._replace(name=f"{layer}.{node.name}") for layer in range(shape.mtp) for node in one)
    return (*_attention(shape), *_second_half(shape, kind == "experts"))


def _embedding(shape: Shape) -> Work:
    moved = 2 * _stream(shape)
    words = shape.vocabulary * shape.hidden / shape.tensor_parallel
    saved = _INDEX * shape.tokens * (2 if shape.positions else 1)
    return Work("embedding", 0.0, moved, saved, parameters=shape.positions * shape.hidden, words=words)


def _attention(shape: Shape) -> tuple[Work, ...]:
    queries = shape.heads * shape.head_size / shape.tensor_parallel
    pairs = 2 * shape.groups * shape.head_size / shape.tensor_parallel
    inside, tokens = shape.tokens * shape.element_bytes, shape.tokens
    # Causal: half of the scores.
    core = Work(
        "core_attention",
        flops=4 * tokens * shape.sequence * queries / 2,
        moved_bytes=inside * (2 * queries + pairs),
        saved_bytes=inside * (queries + pairs) + _SINGLE * tokens * shape.heads / shape.tensor_parallel,
        backward=_BACKWARD_OF_CORE,
    )
    if shape.recompute == "selective":
        core = core._replace(backward=_BACKWARD_OF_CORE + 1)
    return (
        _norm(shape, "input_norm"),
        _product(shape, "qkv", shape.hidden, queries + pairs, _kept_input(shape)),
        core,
        _product(shape, "projection", queries, shape.hidden, inside * queries),
    )


def _second_half(shape: Shape, experts: bool) -> tuple[Work, ...]:
    norm = _norm(shape, SECOND_HALF)
    if not experts:
        return (norm, *_mlp(shape, "", shape.ffn / shape.tensor_parallel))
    routed = shape.expert_count * shape.hidden
    router = Work(
        "router",
        flops=2 * shape.tokens * routed,
        moved_bytes=_SINGLE * shape.tokens * shape.expert_count + _stream(shape),
        saved_bytes=_stream(shape) + _SINGLE * shape.tokens * shape.expert_count,
        parameters=routed,
    )
    shared = _mlp(shape, "shared_", shape.shared_ffn / shape.tensor_parallel) if shape.shared_ffn else ()
    return (norm, router, _experts(shape), *shared)


def _experts(shape: Shape) -> Work:
    """Tokens spread evenly over the experts; every rank computes as many as it has itself, times top-k."""
    width = shape.expert_ffn / shape.tensor_parallel
    rows = shape.tokens * shape.top_k
    up = 2 if shape.gated else 1
    biases = shape.bias * shape.hidden * shape.expert_count / shape.expert_parallel
    here = shape.expert_count / shape.expert_parallel * shape.expert_ffn / shape.expert_tensor_parallel
    return Work(
        "experts",
        flops=2 * rows * shape.hidden * width * (up + 1),
        moved_bytes=shape.element_bytes * (rows * (2 * shape.hidden + 2 * up * width) + here * shape.hidden * (up + 1)),
        saved_bytes=shape.element_bytes * rows * (2 * shape.hidden + (up + 1) * width),
        expert_parameters=here * (shape.hidden * (up + 1) + shape.bias * up) + biases,
    )


def _mlp(shape: Shape, prefix: str, width: float) -> tuple[Work, ...]:
    up = 2 if shape.gated else 1
    inside = shape.tokens * shape.element_bytes * width
    return (
        _product(shape, f"{prefix}fc1", shape.hidden, up * width, _kept_input(shape)),
        Work(f"{prefix}activation", 0.0, (up + 1) * inside, up * inside),
        _product(shape, f"{prefix}fc2", width, shape.hidden, inside),
    )


def _mtp(shape: Shape) -> tuple[Work, ...]:
    """Embedding and hidden state, each with its norm, side by side through a product of 2h × h; a layer; a norm."""
    last = shape.experts[-1]
    words = shape.vocabulary * shape.hidden / shape.tensor_parallel
    return (
        _norm(shape, "embedding_norm")._replace(words=words),
        _norm(shape, "hidden_norm"),
        _joining(shape),
        *_attention(shape),
        *_second_half(shape, last),
        _norm(shape, "final_norm"),
    )


def _joining(shape: Shape) -> Work:
    columns = shape.hidden / shape.tensor_parallel
    product = _product(shape, "joining", 2 * shape.hidden, columns, 2 * _kept_input(shape))
    return product._replace(parameters=2 * shape.hidden * columns)


def _loss(shape: Shape) -> tuple[Work, ...]:
    """One head for the model's own loss and one for each MTP layer; they share their weights."""
    heads = 1 + shape.mtp
    width = shape.vocabulary / shape.tensor_parallel
    weights = shape.hidden * width
    output = _product(shape, "output_layer", shape.hidden, width, _kept_input(shape))
    output = output._replace(
        flops=heads * output.flops,
        moved_bytes=heads * output.moved_bytes,
        saved_bytes=heads * output.saved_bytes,
        parameters=0.0 if shape.tied else weights,
        words=weights if shape.tied else 0.0,
    )
    logits = heads * _SINGLE * shape.tokens * width
    return (_norm(shape, "final_norm"), output, Work("cross_entropy", 0.0, 3 * logits, logits))


def _norm(shape: Shape, name: str) -> Work:
    return Work(name, 0.0, 2 * _stream(shape), _stream(shape), parameters=(1 + shape.norm_bias) * shape.hidden)


def _product(shape: Shape, name: str, rows: float, columns: float, saved: float) -> Work:
    """A product with weights of `rows` × `columns`, and a bias if products have one."""
    moved = shape.element_bytes * (shape.tokens * (rows + columns) + rows * columns)
    return Work(name, 2 * shape.tokens * rows * columns, moved, saved, parameters=(rows + shape.bias) * columns)


def _stream(shape: Shape) -> float:
    """Bytes of a micro-batch's hidden states where sequence parallelism splits them."""
    split = shape.tensor_parallel if shape.sequence_parallel else 1
    return shape.tokens * shape.hidden * shape.element_bytes / split


def _kept_input(shape: Shape) -> float:
    """A product's input, which Megatron keeps split and gathers anew in the backward."""
    return _stream(shape)
