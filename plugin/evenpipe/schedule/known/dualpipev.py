"""DualPipeV (github.com/deepseek-ai/DualPipe): chunks in a V, backwards in halves in warm-up and cool-down only.

Forwards and backwards that its own code overlaps in one fused step come one after the other, unless an engine overlaps
them: then backwards are whole, as in its code without zero bubbles.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from evenpipe.schedule.actions import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Kind, Unit
from evenpipe.schedule.spec import Drawing, Size, Spec
from evenpipe.schedule.topology import vee

__all__ = ["SPEC"]

_Pass = tuple[Kind, int]

_F0: Final[_Pass] = (FORWARD, 0)
_F1: Final[_Pass] = (FORWARD, 1)
_B0: Final[_Pass] = (BACKWARD, 0)
_B1: Final[_Pass] = (BACKWARD, 1)
_D0: Final[_Pass] = (INPUT_GRADIENT, 0)
_D1: Final[_Pass] = (INPUT_GRADIENT, 1)
_W: Final[_Pass] = (WEIGHT_GRADIENT, -1)  # of the oldest input gradient without one, whatever its chunk


def _passes(p: int, stage: int, m: int) -> Iterator[_Pass]:
    """Yield kind and chunk of each pass of one of p stages, for m ≥ 2p micro-batches, by the steps of its own code."""
    left = p - stage - 1
    yield from [_F0] * (2 * left)
    yield from [_F0, _F1] * (stage + 1)
    yield from [_D1, _W, _F1] * left
    yield from [_F0, _B1, _F1, _B0] * (m - 2 * p + stage + 1)  # fused: F0 with B1, F1 with B0
    yield from [_B1, _F1, _B0] * left
    yield from ([_B1, _B0] * (stage + 1))[: stage + 1]
    yield from ([_D1, _D0] * (stage + 1))[stage + 1 :]
    yield from [_W, _D0] * left
    yield from [_W] * (stage + 1)


def _row(p: int, stage: int, micro_batches: int) -> list[Action]:
    """Return a stage's order; fewer micro-batches than 2p come as they do among so many."""
    given, pending = Counter[tuple[bool, int]](), deque[Unit]()
    row = []
    for kind, chunk in _passes(p, stage, max(2 * p, micro_batches)):
        if kind == WEIGHT_GRADIENT:
            unit = pending.popleft()
        else:
            unit = Unit(given[kind == FORWARD, chunk], chunk)
            given[kind == FORWARD, chunk] += 1
            pending.extend([unit] * (kind == INPUT_GRADIENT))
        if unit.micro_batch < micro_batches:
            row.append(Action(kind, *unit))
    return row


def _order(size: Size) -> list[list[Action]]:
    return [_row(size.stages, stage, size.micro_batches) for stage in range(size.stages)]


def _whole(row: list[Action]) -> list[Action]:
    """Return the row with each backward where its first half was."""
    return [
        action._replace(kind=BACKWARD) if action.kind == INPUT_GRADIENT else action
        for action in row
        if action.kind != WEIGHT_GRADIENT
    ]


_SPEC = Spec(
    name="dualpipev",
    summary="two model chunks a stage, there and back, with backwards in halves at start and end only",
    order=_order,
    bound=lambda size: min(2 * size.stages + 1, 2 * size.micro_batches),
    places=lambda size: vee(size.stages),
    chunks=(2, 2),
    needs=frozenset(["chunks", "split", "vee"]),
    drawings=(
        Drawing(
            Size(2, 5),
            """
            F0 F1 F2 F0.1 D0.1 W0.1 F1.1 F3 B1.1 F2.1 B0 F4 B2.1 F3.1 B1 B3.1 F4.1 B2 B4.1 D3 W3 D4 W4
            F0 F0.1 F1 F1.1 F2 B0.1 F2.1 B0 F3 B1.1 F3.1 B1 F4 B2.1 F4.1 B2 B3.1 B3 D4.1 D4 W4.1 W4
            """,
            "as torch.distributed.pipelining's ScheduleDualPipeV orders it",
        ),
    ),
)

SPEC = replace(
    _SPEC,
    fused_form=replace(
        _SPEC,
        order=lambda size: [_whole(row) for row in _order(size)],
        needs=frozenset(["chunks", "vee"]),
        drawings=(),
        fused=True,
    ),
)
