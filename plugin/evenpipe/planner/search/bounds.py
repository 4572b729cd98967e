"""Lower bounds of a run's time and memory, from one block of each kind: microseconds instead of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, NamedTuple

from evenpipe.descriptions import Device
from evenpipe.planner.iteration import HandOver, batch_end
from evenpipe.planner.operations.operation import Parameters, summed
from evenpipe.planner.run import Run
from evenpipe.planner.search.profiles import PartCost
from evenpipe.planner.stage_bytes import Chunk, States, bytes_of_stage, stage_states
from evenpipe.planner.stage_nodes import Placed, Positions
from evenpipe.schedule import KINDS, Size, Spec
from evenpipe.schedule.actions import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT

__all__ = [
    "Edges",
    "edges_of",
    "least_bytes",
    "least_bytes_of_any_layout",
    "least_end_ms",
    "least_live",
    "least_ms",
    "ordered_ms",
    "unlike",
]

_MS: Final = 1e3


class Edge(NamedTuple):
    """A stage's first or last action on one of its parts, in the order of its schedule.

    work: how many forwards, input gradients and weight gradients the stage has before its first one, or after its last.
    """

    position: int
    backward: bool
    work: tuple[int, int, int]


class Edges(NamedTuple):
    """By stage: the first action on each part within the first half of a short batch, the last within its second."""

    first: Sequence[Sequence[Edge]]
    last: Sequence[Sequence[Edge]]


def edges_of(spec: Spec, size: Size) -> Edges | None:
    """Return where a stage waits at the ends of a batch beside its schedule's order; None for short batches.

    None too for schedules whose waits `least_ms` has anyway: those whose live units are known without their order.
    """
    if spec.live is not None or size.micro_batches < 2 * size.stages:
        return None
    return _edges(spec, size._replace(micro_batches=2 * size.stages))


@cache
def _edges(spec: Spec, size: Size) -> Edges:
    """As a batch of two rounds has them: a longer one of the package's schedules begins and ends alike."""
    places = spec.places(size)
    rows = [
        [(one.kind, places.position(stage, one.chunk)) for one in row] for stage, row in enumerate(spec.order(size))
    ]
    return Edges([_first(row) for row in rows], [_first(row[::-1]) for row in rows])


def _first(row: Sequence[tuple[str, int]]) -> list[Edge]:
    found: dict[tuple[bool, int], Edge] = {}
    forwards = gradients = weights = 0
    for kind, position in row[: len(row) // 2]:
        if kind != WEIGHT_GRADIENT:
            backward = kind != FORWARD
            found.setdefault((backward, position), Edge(position, backward, (forwards, gradients, weights)))
        forwards += kind == FORWARD
        gradients += kind in (BACKWARD, INPUT_GRADIENT)
        weights += kind in (BACKWARD, WEIGHT_GRADIENT)
    return list(found.values())


def _waits(edges: Sequence[Edge], each: tuple[float, float, float], ms: Callable[[Edge], float]) -> float:
    """Return the longest wait: ``ms`` that others take beside an edge, less the stage's own work there."""
    return max((ms(edge) - sum(map(float.__mul__, each, map(float, edge.work))) for edge in edges), default=0.0)


def ordered_ms(
    edges: Edges, where: Positions, m: int, times: Sequence[tuple[float, float, float]], lag: float
) -> float:
    """Return a lower bound of a batch by its order; ``times``: of each stage's chunk, of a micro-batch.

    Before its first action on a part a stage has done what its order has before it, and others what that waits for: the
    parts before it, and for a gradient all forwards and the parts behind it. After its last action likewise.
    """
    f, d = [0.0], [0.0]
    for position, stage in enumerate(where.stages):
        hop = lag * (position > 0 and stage != where.stages[position - 1])
        f.append(f[-1] + times[stage][0] + hop)
        d.append(d[-1] + times[stage][1] + hop)

    def hop_to(position: int) -> float:
        return lag * (position > 0 and where.stages[position] != where.stages[position - 1])

    def before(edge: Edge) -> float:
        n = edge.position
        if not edge.backward:
            return f[n] + hop_to(n)
        return f[-1] + d[-1] - d[n + 1]

    def after(edge: Edge) -> float:
        n = edge.position
        return d[n] + hop_to(n) if edge.backward else f[-1] - f[n + 1] + d[-1]

    chunks = len(where.at[0])
    return max(
        m * chunks * sum(each) + max(0.0, _waits(first, each, before)) + max(0.0, _waits(last, each, after))
        for each, first, last in zip(times, edges.first, edges.last, strict=True)
    )


def least_ms(
    parts: Sequence[PartCost],
    where: Positions,
    run: Run,
    over: HandOver,
    split: bool,
    stream: bool,
    edges: Edges | None = None,
) -> float:
    """Return a lower bound of a batch's milliseconds, without its end, by its slowest stage's work and waits.

    Stage s carries out m forwards and m backwards, one at a time: m (f_s + b_s). Its first forward waits for the
    forwards of the parts before its first one, and for their messages (fill_s). After its last backward of that part,
    their backwards follow (drain_s). So a batch takes at least fill_s + m (f_s + b_s) + drain_s, for every s. Where
    backwards are split, gradients of weights may run beside the drain: before it, at least m (f_s + b_s − w_s) remain.
    ``edges``: of a schedule that orders its ends otherwise than by these waits alone, where it has more of them.
    In a stream the next batch fills what this one leaves, so only m (f_s + b_s) is certain. (`Estimator` divides a
    stage's time evenly among its chunks, and so does this.)
    """
    chunks = len(where.at[0])
    forward, backward, late = [], [], []
    for own, sends, returns in zip(where.at, where.sends, where.returns, strict=True):
        forward.append(_MS * sum(parts[n].time.forward for n in own) + sends * over.wait_ms)
        backward.append(_MS * sum(parts[n].time.backward for n in own) + returns * over.wait_ms)
        late.append(_MS * sum(parts[n].time.weights for n in own) if split else 0.0)
    m = run.micro_batches
    if stream:
        return m * max(map(float.__add__, forward, backward))
    drains = [b - w for b, w in zip(backward, late, strict=True)]
    lag = over.latency_ms + over.transmit_ms
    most = fill = drain = 0.0
    for position, stage in enumerate(where.stages[: len(where.at)]):
        if position and stage != where.stages[position - 1]:
            fill, drain = fill + lag, drain + lag
        whole = m * (forward[stage] + backward[stage])
        most = max(most, fill + max(whole, whole - m * late[stage] + drain))
        fill += forward[stage] / chunks
        drain += drains[stage] / chunks
    if edges is not None and split:
        times = [(f / chunks, d / chunks, w / chunks) for f, d, w in zip(forward, drains, late, strict=True)]
        most = max(most, ordered_ms(edges, where, m, times, lag))
    return most


def least_live(spec: Spec, size: Size, bpipe: bool) -> Sequence[int]:
    """Per stage, units that are live at once at least: without BPipe as the schedule's order has them.

    BPipe evicts only from stages that hold more than the balanced bound, down to it, and never what a partner itself
    made; so every stage still holds the lesser of both. Guests come on top.
    """
    live = (
        spec.live(size)
        if spec.live is not None
        else _counted(spec, size._replace(micro_batches=min(size.micro_batches, 2 * size.stages)))
    )
    if not bpipe:
        return live
    assert spec.balanced is not None
    level = spec.balanced(size)
    return [min(held, level) for held in live]


@cache
def _counted(spec: Spec, size: Size) -> Sequence[int]:
    """As a batch of no more than two rounds has them: a longer one of the package's schedules begins alike."""
    found = []
    for row in spec.order(size):
        held = most = 0
        for action in row:
            held += KINDS[action.kind].held
            most = max(most, held)
        found.append(most)
    return found


def least_bytes(
    own: Sequence[Chunk], held: States, live: int, split: bool, run: Run, message_bytes: float, device: Device
) -> int:
    """Return a lower bound of the bytes of a stage with ``live`` units live, each at its least in the smallest chunk.

    ``held``: what stays on it (`stage_states`). ``split``: backwards are. Guests weigh more or less than own units; the
    bound assumes that they displace nothing, and leaves them out. A stage's bytes grow with what it has saved.
    """
    each = [chunk.kept_bytes for chunk in own]
    if split:
        each += [chunk.left_bytes for chunk in own]
    return bytes_of_stage(own, held, round(live * min(each)), run, message_bytes, device).total


def unlike(parts: Sequence[PartCost], where: Positions) -> Sequence[int]:
    """Return the first stage of each group with the same blocks, and the last stage.

    The first of a group holds the most micro-batches; the last stage has guests.
    """
    first: dict[tuple[int, ...], int] = {}
    for stage, own in enumerate(where.at):
        first.setdefault(tuple(id(parts[n]) for n in own), stage)
    return sorted({*first.values(), len(where.at) - 1})


def least_bytes_of_any_layout(whole: Chunk, run: Run, device: Device) -> int:
    """Return a lower bound of the fullest stage's bytes, however layers are laid out, under any schedule.

    When the first micro-batch has gone through all parts, the stages together hold all that is kept of it. The bound is
    the mean of all stages: that, and their weights, gradients and optimizer state. No layout has less on its fullest.
    """
    mean = Chunk(Parameters(*(count / run.stages for count in whole.parameters)), 0.0, 0.0, 0.0)
    held = stage_states([mean], run, 1, device.transposing)
    return bytes_of_stage([mean], held, int(whole.kept_bytes / run.stages), run, 0.0, device).total


def least_end_ms(parts: Sequence[PartCost], where: Positions, run: Run, placed: Placed) -> float:
    """Return a lower bound of the milliseconds of a batch's end: the longer end of the first stage and the last.

    The longest of all stages' ends is no shorter.
    """
    most = 0.0
    for stage in {0, len(where.at) - 1}:
        own = [parts[n] for n in where.at[stage]]
        parameters = summed(one.chunk.parameters for one in own)
        forward, backward = (sum(one.time[field] for one in own) for field in range(2))
        for kernels in placed.kernels(placed.groups[stage]):
            most = max(most, batch_end(parameters, run, kernels, forward, backward))
    return _MS * most
