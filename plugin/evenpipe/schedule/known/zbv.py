"""ZB-V (Zero Bubble Pipeline Parallelism, arXiv 2401.10241): chunks in a V, 1F1B's memory, no bubble if F = D = W."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from evenpipe.schedule.actions import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Kind
from evenpipe.schedule.spec import Drawing, Size, Spec
from evenpipe.schedule.topology import vee

__all__ = ["SPEC"]

_Pass = tuple[Kind, int]

_F0: Final[_Pass] = (FORWARD, 0)
_F1: Final[_Pass] = (FORWARD, 1)
_B0: Final[tuple[_Pass, _Pass]] = ((INPUT_GRADIENT, 0), (WEIGHT_GRADIENT, 0))
_B1: Final[tuple[_Pass, _Pass]] = ((INPUT_GRADIENT, 1), (WEIGHT_GRADIENT, 1))


def _passes(p: int, stage: int, m: int) -> Iterator[_Pass]:
    """Yield kind and chunk of each pass of one of p stages, for m ≥ 2p − 1 micro-batches, which come in order.

    The first micro-batch comes back to the stage when it has forwarded 2 (p − stage) − 1. Of the last ones, weight
    gradients come after the input gradients that other stages wait for.
    """
    yield from [_F0] * (2 * (p - stage) - 1)
    yield from [_F1, _F0] * stage
    yield from [_F1, *_B1] * (p - stage)
    steady = m - (2 * p - 1 - stage)  # forwards of chunk 0 that are left
    yield from [_F0, *_B0, _F1, *_B1] * steady
    yield from [*_B0, _F1, *_B1] * (m - steady - p)
    yield from [_B0[0], _B1[0]] * stage
    yield from _B0 * (p - stage)
    yield from [_B1[1]] * stage
    yield from [_B0[1]] * stage


def _row(p: int, stage: int, micro_batches: int) -> list[Action]:
    """Return a stage's order; fewer micro-batches than 2p − 1 come as they do among so many."""
    given: dict[_Pass, int] = {}
    row = []
    for kind, chunk in _passes(p, stage, max(2 * p - 1, micro_batches)):
        number = given.setdefault((kind, chunk), 0)
        given[kind, chunk] += 1
        if number < micro_batches:
            row.append(Action(kind, number, chunk))
    return row


SPEC = Spec(
    name="zbv",
    summary="two model chunks a stage, there and back, with backwards in two halves: 1f1b's memory, next to no bubble",
    order=lambda size: [_row(size.stages, stage, size.micro_batches) for stage in range(size.stages)],
    bound=lambda size: 2 * min(size.stages, size.micro_batches),
    places=lambda size: vee(size.stages),
    chunks=(2, 2),
    needs=frozenset(["chunks", "split", "vee"]),
    drawings=(
        Drawing(
            Size(2, 4),
            """
            F0 F1 F2 F0.1 D0.1 W0.1 F1.1 D1.1 W1.1 F3 D0 W0 F2.1 D2.1 W2.1 D1 W1 F3.1 D3.1 W3.1 D2 W2 D3 W3
            F0 F0.1 F1 F1.1 D0.1 W0.1 F2 D0 W0 F2.1 D1.1 W1.1 F3 D1 W1 F3.1 D2.1 W2.1 D2 D3.1 D3 W2 W3.1 W3
            """,
            "as torch.distributed.pipelining's ScheduleZBVZeroBubble orders it",
        ),
    ),
)
