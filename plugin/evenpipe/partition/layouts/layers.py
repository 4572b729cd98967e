"""A model as a row of layers with time and bytes, and the parts that a layout cuts it into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from evenpipe.partition.counting import Effort
from evenpipe.partition.layouts.shape import Shape
from evenpipe.partition.layouts.work import SECOND_HALF, Work, kind_of_layer, work_of
from evenpipe.partition.timing import Roofline
from evenpipe.planner.descriptions import Device

__all__ = ["Layer", "Time", "Times", "layers_of", "layout_text", "parts_of", "roofline"]


class Time(NamedTuple):
    """Of one micro-batch through a layer: milliseconds, and bytes that it saves for its backward."""

    forward_ms: float
    backward_ms: float
    saved_bytes: int


Times: TypeAlias = Mapping[str, Mapping[str, Time]]
"""By kind of layer, by node in order; without full recomputation."""


@dataclass(frozen=True)
class Layer:
    """What a layout puts somewhere as a whole. `symbols`: as Megatron writes it ("E", "t", "L"; "mm" two MTP layers).

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


def roofline(shape: Shape, kind: str, device: Device) -> dict[str, Time]:
    """Of every node of a layer, in order, one kernel each way. Raises RooflineError for a precision it lacks."""
    of = Roofline(device)
    found = {}
    for node in work_of(shape, kind):
        forward, backward = (
            of.ms(Effort(round(times * node.flops), round(times * node.moved_bytes), 1), shape.precision)
            for times in (1.0, node.backward)
        )
        found[node.name] = Time(forward, backward, int(node.saved_bytes))
    return found


def _total(nodes: Iterable[Time]) -> Time:
    forward, backward, saved = zip(*nodes, strict=True)
    return Time(sum(forward), sum(backward), sum(saved))


def _input_bytes(shape: Shape) -> int:
    """What a layer that is computed again keeps."""
    split = shape.tensor_parallel if shape.sequence_parallel else 1
    return shape.tokens * shape.hidden * shape.element_bytes // split


def layers_of(shape: Shape, times: Times, halves: bool = False) -> tuple[Layer, ...]:
    """The model in order: embedding, transformer layers, MTP layers as one, output and loss.

    `halves`: transformer layers may be cut between attention and MLP.
    """

    def layer(symbols: str, kind: str) -> Layer:
        return _layer(shape, symbols, kind, times[kind], work_of(shape, kind))

    row = [layer("E", "embedding")]
    for kind in map(kind_of_layer, shape.experts):
        row += _halves(shape, kind, times[kind]) if halves else [layer("t", kind)]
    row += [layer("m" * shape.mtp, "mtp")] if shape.mtp else []
    return (*row, layer("L", "loss"))


def _halves(shape: Shape, kind: str, times: Mapping[str, Time]) -> list[Layer]:
    nodes, names = work_of(shape, kind), list(times)
    attention = {node.name for node in nodes[: [node.name for node in nodes].index(SECOND_HALF)]}
    second = names.index(SECOND_HALF)
    return [
        _layer(
            shape,
            symbols,
            kind,
            {name: times[name] for name in of_half},
            [node for node in nodes if (node.name in attention) == bool(symbols)],
        )
        for symbols, of_half in (("t", names[:second]), ("", names[second:]))
    ]


def _layer(shape: Shape, symbols: str, kind: str, times: Mapping[str, Time], nodes: Sequence[Work]) -> Layer:
    time, whole = _total(times.values()), kind in ("dense", "experts") and len(nodes) == len(work_of(shape, kind))
    again = _input_bytes(shape) if whole and shape.recompute is None else None
    if shape.recompute == "full" and kind in ("dense", "experts"):
        time = Time(time.forward_ms, time.backward_ms + time.forward_ms, _input_bytes(shape))
    static = sum(_static(shape, node) for node in nodes)
    words = max(node.words for node in nodes)
    return Layer(symbols, kind, *time, int(static), int(words * shape.parameter_bytes), again)


def _static(shape: Shape, node: Work) -> float:
    return node.parameters * shape.parameter_bytes + node.expert_parameters * shape.expert_parameter_bytes


def parts_of(layers: Sequence[Layer], cuts: Sequence[int]) -> tuple[tuple[Layer, ...], ...]:
    """The parts between `cuts`: each is the number of layers before it, in ascending order."""
    ends = [0, *cuts, len(layers)]
    return tuple(tuple(layers[first:end]) for first, end in pairwise(ends))


def layout_text(parts: Sequence[Sequence[Layer]]) -> str:
    """As `--pipeline-model-parallel-layout` takes it."""
    return "|".join("".join(layer.symbols for layer in part) for part in parts)
