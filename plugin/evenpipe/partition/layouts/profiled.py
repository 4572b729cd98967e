"""The profile of a Megatron GPT, node by node: each of its layers' nodes with what was found for one of its kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Final, NamedTuple

from evenpipe.partition.layouts.layers import Time, Times
from evenpipe.partition.layouts.shape import Shape
from evenpipe.partition.layouts.work import kind_of_layer, work_of
from evenpipe.partition.profile import Node, Origin, Parameter, Profile, Storage

__all__ = ["profile_of"]

_WORDS: Final = "word_embeddings"
_GRADIENT: Final = 4


def profile_of(shape: Shape, times: Times, *, device: str, versions: Mapping[str, str]) -> Profile:
    """From the nodes of one layer of each kind. Stages may end with a layer, where hidden states go to the next one.

    A node's storage is what it saves first. Parameters of nodes that have no time of their own are of their layer's
    last node. `device` "cpu" is one on which times were measured.
    """
    rows = list(_rows(shape, times))
    users = tuple(number for number, row in enumerate(rows) if row.words)
    own = [_parameter(shape, row.name, row.parameters, row.expert_parameters, (n,)) for n, row in enumerate(rows)]
    words = _parameter(shape, _WORDS, max(row.words for row in rows), 0.0, users)
    first = [[mine, words] if users[0] == n else [mine] for n, mine in enumerate(own)]
    return Profile(
        origin=Origin(
            model="gpt of Megatron",
            micro_batch_size=shape.micro_batch,
            device=device,
            precision=shape.precision,
            source="measured on this CPU" if device == "cpu" else "roofline",
            digest=sha256(repr((shape, [row.name for row in rows])).encode()).hexdigest(),
            versions=dict(versions),
        ),
        nodes=tuple(_node(shape, row, mine) for row, mine in zip(rows, first, strict=True)),
        storages=tuple(
            Storage(nbytes=row.time.saved_bytes, producer=n, users=(n,), savers=(n,))
            for n, row in enumerate(rows)
            if row.time.saved_bytes
        ),
        parameters=tuple(one for one in (*own, words) if one.nbytes),
        layer_ends=tuple(n for n, row in enumerate(rows) if row.ends),
    )


class _Row(NamedTuple):
    """A node of the model. `ends`: the layer, and a stage may end there."""

    name: str
    time: Time
    parameters: float
    expert_parameters: float
    words: float
    ends: bool


def _rows(shape: Shape, times: Times) -> Iterator[_Row]:
    layers = [(f"layers.{n}", kind_of_layer(experts)) for n, experts in enumerate(shape.experts)]
    for layer, kind in [
        ("embedding", "embedding"),
        *layers,
        *([("mtp", "mtp")] if shape.mtp else []),
        ("loss", "loss"),
    ]:
        found = times[kind]
        last = list(found)[-1]
        for name, time in found.items():
            own = [one for one in work_of(shape, kind) if one.name == name or (name == last and one.name not in found)]
            yield _Row(
                name=layer if len(found) == 1 else f"{layer}.{name}",
                time=time,
                parameters=sum(one.parameters for one in own),
                expert_parameters=sum(one.expert_parameters for one in own),
                words=max((one.words for one in own), default=0.0),
                ends=name == last and kind != "loss",
            )


def _parameter(shape: Shape, name: str, count: float, experts: float, users: tuple[int, ...]) -> Parameter:
    kept = shape.element_bytes + _GRADIENT
    optimizer = count * (shape.parameter_bytes - kept) + experts * (shape.expert_parameter_bytes - kept)
    return Parameter(
        name=name,
        nbytes=int((count + experts) * shape.element_bytes),
        gradient_bytes=int((count + experts) * _GRADIENT),
        optimizer_bytes=int(optimizer),
        users=users,
    )


def _node(shape: Shape, row: _Row, first: list[Parameter]) -> Node:
    """`first`: the parameters that it is the first to use."""
    stream = shape.tokens * shape.hidden * shape.element_bytes if row.ends else 0
    return Node(
        name=row.name,
        forward_ms=row.time.forward_ms,
        backward_ms=row.time.backward_ms,
        activation_bytes=row.time.saved_bytes,
        parameter_bytes=sum(one.nbytes for one in first),
        gradient_bytes=sum(one.gradient_bytes for one in first),
        optimizer_bytes=sum(one.optimizer_bytes for one in first),
        released_bytes=0,
        output_bytes=stream,
        cut_allowed=row.ends,
        cut_bytes=stream,
    )
