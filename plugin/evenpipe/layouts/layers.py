"""A model as a row of layers with time and bytes, the parts that a layout cuts it into, and its profile by nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias, TypeVar

from evenpipe.descriptions import Device, node_of
from evenpipe.layouts.gpt import Gpt, LayoutError
from evenpipe.partition.profile import Node, Origin, Parameter, Profile, Storage
from evenpipe.planner.kernels import FITTED, Kernels
from evenpipe.planner.operations.operation import Operation, Parameters, Shard, total
from evenpipe.planner.operations.parts import Blocks
from evenpipe.planner.stage_bytes import states

__all__ = [
    "Layer",
    "Time",
    "Times",
    "described",
    "kinds",
    "layers_of",
    "layout_text",
    "nodes_of",
    "parts_of",
    "profile_of",
]

#: The first node of a transformer layer behind its attention.
_SECOND_HALF: Final = "mlp_norm"
_TRANSFORMER: Final = ("dense", "experts")
#: Nodes that use the word embeddings; the output layer does where it is tied to them.
_WITH_WORDS: Final = frozenset({"embedding", "embedding_norm", "output_layer"})
_T = TypeVar("_T")
_MS: Final = 1e3


class Time(NamedTuple):
    """The milliseconds of one micro-batch through a layer, and the bytes that it saves for its backward."""

    forward_ms: float
    backward_ms: float
    saved_bytes: int


Times: TypeAlias = Mapping[str, Mapping[str, Time]]
"""By kind of layer, by node in order; without full recomputation."""
Nodes: TypeAlias = Mapping[str, Sequence[Operation]]


@dataclass(frozen=True)
class Layer:
    """A piece that a layout places as a whole. `symbols`: as Megatron writes it ("E", "t", "L"; "mm" two MTP layers).

    A layer that may be cut in half is two of these: "t" is then its attention, and its MLP, without symbols, follows.

    Bytes of one rank: `saved_bytes` of a micro-batch until its backward, and `input_bytes` alone if that begins with
    another forward (None: it cannot); `static_bytes` of weights, gradients and optimizer; `words_bytes` the same of a
    copy of the word embeddings, of which a stage needs one at most.
    """

    symbols: str
    kind: str
    forward_ms: float
    backward_ms: float
    saved_bytes: int = 0
    static_bytes: int = 0
    words_bytes: int = 0
    input_bytes: int | None = None

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms


def kinds(gpt: Gpt) -> tuple[str, ...]:
    """Return the kinds of layers that the model has, in the order of their first."""
    layers = dict.fromkeys(_TRANSFORMER[gpt.has_experts(layer)] for layer in range(gpt.model.layers))
    return ("embedding", *layers, *(("mtp",) if gpt.model.mtp_layers else ()), "loss")


def nodes_of(gpt: Gpt, kind: str) -> dict[str, list[Operation]]:
    """The operations of a layer of `kind` by node, which is a module of Megatron's: "mtp" is all of the MTP layers,
    "loss" has a head for each of them. A tied output layer has no weights of its own.
    """
    blocks, mtp = Blocks(gpt.model, gpt.run).operations, gpt.model.mtp_layers
    match kind:
        case "embedding":
            found = {"": blocks["embedding"]}
        case "loss":
            head = blocks["tied head" if gpt.model.tied else "head"]
            found = {"": head + mtp * blocks["further head"]}
        case "mtp":
            found = {f"{layer}.": blocks["further token"] for layer in range(mtp)}
        case _:
            found = {"": blocks["expert layer" if kind == "experts" else "layer"]}
    nodes: dict[str, list[Operation]] = defaultdict(list)
    for prefix, operations in found.items():
        for operation in operations:
            nodes[prefix + operation.name.partition(".")[0]].append(operation)
    return dict(nodes)


def described(gpt: Gpt, device: Device) -> dict[str, dict[str, Time]]:
    """Times of every node as the planner estimates them, with the GPUs of a stage in one node.

    Raises LayoutError for a precision that the device lacks.
    """
    if gpt.run.precision not in device.tflops:
        known = ", ".join(device.tflops)
        raise LayoutError(f"{device.name} does not compute in {gpt.run.precision}: it does in {known}")
    kernels = Kernels(gpt.run, node_of(device, gpt.stage_ranks), FITTED)

    def time(operations: Sequence[Operation]) -> Time:
        again = [one for one in operations if one.module in gpt.run.again]
        forward = kernels.seconds(work for one in operations for work in one.forward)
        backward = kernels.seconds(work for one in operations for work in (*one.backward, *one.weight_gradient))
        backward += kernels.seconds(work for one in again for work in one.forward)
        kept = sum(one.saved_bytes for one in operations if one.source not in gpt.run.again)
        return Time(_MS * forward, _MS * backward, int(kept))

    return {kind: {name: time(one) for name, one in nodes_of(gpt, kind).items()} for kind in kinds(gpt)}


def layers_of(gpt: Gpt, times: Times, halves: bool = False) -> tuple[Layer, ...]:
    """Return the model in order: embedding, transformer layers, MTP layers as one, output and loss.

    `halves`: transformer layers may be cut between attention and MLP.
    """
    nodes = {kind: nodes_of(gpt, kind) for kind in kinds(gpt)}

    def whole(symbols: str, kind: str) -> Layer:
        return _layer(gpt, symbols, kind, times[kind], nodes[kind])

    row = [whole("E", "embedding")]
    for layer in range(gpt.model.layers):
        kind = _TRANSFORMER[gpt.has_experts(layer)]
        if halves:
            pairs = zip(("t", ""), _cut(times[kind]), _cut(nodes[kind]), strict=True)
            row += [_layer(gpt, *half, cut=True) for half in ((s, kind, t, n) for s, t, n in pairs)]
        else:
            row.append(whole("t", kind))
    row += [whole("m" * gpt.model.mtp_layers, "mtp")] if gpt.model.mtp_layers else []
    return (*row, whole("L", "loss"))


def _cut(nodes: Mapping[str, _T]) -> tuple[dict[str, _T], dict[str, _T]]:
    """Return the nodes of a transformer layer before its second half, and the others."""
    items = list(nodes.items())
    at = list(nodes).index(_SECOND_HALF)
    return dict(items[:at]), dict(items[at:])


def _layer(gpt: Gpt, symbols: str, kind: str, times: Mapping[str, Time], nodes: Nodes, cut: bool = False) -> Layer:
    forward, backward, saved = map(sum, zip(*times.values(), strict=True))
    again = kind in _TRANSFORMER and gpt.run.recompute == "full"
    kept = round(gpt.run.element_bytes * Shard(*gpt).residual)
    if again:
        backward, saved = backward + forward, kept
    own, words = _parameters(gpt, nodes)
    static, copy = (int(states(one, gpt.run).stay) for one in (own, words))
    whole = kind in _TRANSFORMER and not cut and gpt.run.recompute == "none"
    return Layer(symbols, kind, forward, backward, saved, static, copy, kept if whole else None)


def _parameters(gpt: Gpt, nodes: Nodes) -> tuple[Parameters, Parameters]:
    """Return these nodes' own parameters, and those of a copy of the word embeddings if one of them uses it."""
    own = total(one for operations in nodes.values() for one in operations)
    users = _WITH_WORDS & {name.rpartition(".")[2] for name in nodes}
    if not users - ({"output_layer"} if not gpt.model.tied else set()):
        return own, Parameters()
    words = gpt.model.vocabulary * gpt.model.hidden / gpt.run.tensor
    return own._replace(shared=own.shared - words * ("embedding" in users)), Parameters(words)


def parts_of(layers: Sequence[Layer], cuts: Sequence[int]) -> tuple[tuple[Layer, ...], ...]:
    """Return the parts between `cuts`: each is the number of layers before it, in ascending order."""
    ends = [0, *cuts, len(layers)]
    return tuple(tuple(layers[first:end]) for first, end in pairwise(ends))


def layout_text(parts: Sequence[Sequence[Layer]]) -> str:
    """As `--pipeline-model-parallel-layout` takes it."""
    return "|".join("".join(layer.symbols for layer in part) for part in parts)


def profile_of(gpt: Gpt, times: Times, *, device: str, versions: Mapping[str, str]) -> Profile:
    """From the nodes of one layer of each kind. Stages may end with a layer, where hidden states go to the next one.

    A node's storage is what it saves first. Parameters of nodes that have no time of their own are of their layer's
    last node. `device` "cpu" is one on which times were measured.
    """
    rows = list(_rows(gpt, times))
    users = tuple(number for number, row in enumerate(rows) if row.words.all)
    own = [_parameter(gpt, row.name, row.own, (n,)) for n, row in enumerate(rows)]
    words = _parameter(gpt, "word_embeddings", rows[users[0]].words, users)
    first = [[mine, words] if users[0] == n else [mine] for n, mine in enumerate(own)]
    return Profile(
        origin=Origin(
            model="gpt of Megatron",
            micro_batch_size=gpt.run.micro_batch,
            device=device,
            precision=str(gpt.run.precision),
            source="measured on this CPU" if device == "cpu" else "estimated",
            digest=sha256(repr((gpt, [row.name for row in rows])).encode()).hexdigest(),
            versions=dict(versions),
        ),
        nodes=tuple(_node(gpt, row, mine) for row, mine in zip(rows, first, strict=True)),
        storages=tuple(
            Storage(nbytes=row.time.saved_bytes, producer=n, users=(n,), savers=(n,))
            for n, row in enumerate(rows)
            if row.time.saved_bytes
        ),
        parameters=tuple(one for one in (*own, words) if one.nbytes),
        layer_ends=tuple(n for n, row in enumerate(rows) if row.ends),
    )


class _Row(NamedTuple):
    """A node of the model: its own parameters, and those of the word embeddings. `ends`: a stage may end there."""

    name: str
    time: Time
    own: Parameters
    words: Parameters
    ends: bool


def _rows(gpt: Gpt, times: Times) -> Iterator[_Row]:
    layers = [(f"layers.{n}", _TRANSFORMER[gpt.has_experts(n)]) for n in range(gpt.model.layers)]
    mtp = [("mtp", "mtp")] if gpt.model.mtp_layers else []
    for layer, kind in [("embedding", "embedding"), *layers, *mtp, ("loss", "loss")]:
        timed, nodes = times[kind], nodes_of(gpt, kind)
        last = list(timed)[-1]
        for name, time in timed.items():
            mine = {one: nodes[one] for one in nodes if one == name or (name == last and one not in timed)}
            yield _Row(
                layer if len(timed) == 1 else f"{layer}.{name}",
                time,
                *_parameters(gpt, mine),
                ends=name == last and kind != "loss",
            )


def _parameter(gpt: Gpt, name: str, parameters: Parameters, users: tuple[int, ...]) -> Parameter:
    held = states(parameters, gpt.run)
    return Parameter(
        name=name,
        nbytes=int(held.weights),
        gradient_bytes=int(held.gradients),
        optimizer_bytes=int(held.optimizer),
        users=users,
    )


def _node(gpt: Gpt, row: _Row, first: list[Parameter]) -> Node:
    """`first`: the parameters that it is the first to use."""
    stream = round(Shard(*gpt).hidden * gpt.run.element_bytes) if row.ends else 0
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
