"""What a run takes and holds at least: microseconds instead of a simulation, to leave out most runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

from evenpipe.planner.descriptions import Device
from evenpipe.planner.memory.stages import Chunk, stage_bytes
from evenpipe.planner.operations.operation import Parameters, summed
from evenpipe.planner.positions import Positions
from evenpipe.planner.run import Run
from evenpipe.planner.search.blocks import PartCost
from evenpipe.planner.time.batch_end import Beside, batch_end
from evenpipe.planner.time.hand_over import HandOver
from evenpipe.planner.time.kernels import Kernels
from evenpipe.schedule import BACKWARD, FORWARD, WEIGHT_GRADIENT, Places, Size, Spec, loop

__all__ = [
    "least_bytes",
    "least_bytes_of_any_layout",
    "least_end_ms",
    "least_live",
    "least_ms",
    "unlike",
]

_MS: Final = 1e3


def least_ms(parts: Sequence[PartCost], where: Positions, run: Run, over: HandOver, split: bool, stream: bool) -> float:
    """Of a batch, without its end: by the work of its slowest stage, and what that has to wait for.

    Stage s carries out m forwards and m backwards, one at a time: m (f_s + b_s). Its first forward waits for those of
    the parts before its first one and their messages (fill_s), and after its last backward of that part theirs follow
    (drain_s); so a batch takes fill_s + m (f_s + b_s) + drain_s, for every s. Where backwards are split, gradients of
    weights may come beside the drain: what is before that is then m (f_s + b_s − w_s) at least. In a stream the next
    batch fills what this one leaves: m (f_s + b_s) is all that is certain. (`Estimator` divides a stage's time evenly
    among its chunks, and so does this.)
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
        halves = any(action.kind == WEIGHT_GRADIENT for action in row)
        for action in row:
            held += (action.kind == FORWARD) - (action.kind == (WEIGHT_GRADIENT if halves else BACKWARD))
            most = max(most, held)
        found.append(most)
    return found


def least_bytes(
    parts: Sequence[PartCost],
    where: Positions,
    stage: int,
    live: int,
    versions: int,
    run: Run,
    message_bytes: float,
    device: Device,
) -> int:
    """Of a stage with so many units live, each as the smallest of its chunks'; guests, which weigh more or less, are
    counted where they displace nothing: not at all. A stage's bytes grow with what it has saved.
    """
    own = [parts[n].chunk for n in where.at[stage]]
    saved = round(live * min(chunk.kept_bytes for chunk in own))
    [held] = stage_bytes(own, [saved], _alone(len(own)), versions, run, message_bytes, device)
    return held.total


def unlike(parts: Sequence[PartCost], where: Positions) -> Sequence[int]:
    """Of stages with the same blocks the first, which holds the most micro-batches; and the last, which has guests."""
    first: dict[tuple[int, ...], int] = {}
    for stage, own in enumerate(where.at):
        first.setdefault(tuple(id(parts[n]) for n in own), stage)
    return sorted({*first.values(), len(where.at) - 1})


def least_bytes_of_any_layout(whole: Parameters, run: Run, device: Device) -> int:
    """Of the fullest stage, however layers are laid out: weights, gradients and optimizer of the mean of all stages.

    They grow with the numbers of parameters, so that no layout has less on its fullest.
    """
    mean = Chunk(Parameters(*(count / run.stages for count in whole)), 0.0, 0.0)
    [held] = stage_bytes([mean], [0], _alone(1), 1, run, 0.0, device)
    return held.total


@cache
def _alone(chunks: int) -> Places:
    return loop(1, chunks)


def least_end_ms(parts: Sequence[PartCost], where: Positions, run: Run, kernels: Kernels) -> float:
    """Of a batch, at least: the longest of all stages' ends is no shorter than those of the first and the last."""
    most = 0.0
    for stage in {0, len(where.at) - 1}:
        own = [parts[n] for n in where.at[stage]]
        parameters = summed(one.chunk.parameters for one in own)
        beside = Beside(sum(one.time.forward for one in own), sum(one.time.backward for one in own))
        most = max(most, batch_end(parameters, run, kernels, beside))
    return _MS * most
