"""V-Half (Pipeline Parallelism with Controllable Memory, arXiv 2405.15362): chunks in a V, half of 1F1B's memory."""

from __future__ import annotations

from collections import deque

from evenpipe.schedule.actions import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Kind, Unit
from evenpipe.schedule.spec import Drawing, Size, Spec
from evenpipe.schedule.topology import vee

__all__ = ["SPEC"]

_PERIOD = 6  # passes of a micro-batch on a stage: F, D and W of two chunks


def _row(p: int, stage: int, micro_batches: int) -> list[Action]:
    """V-Half's building block, repeated every six passes; weight gradients take the free places, bubbles close.

    The offsets are those of the authors' code (``stable_pattern_v_half`` of sail-sg/zero-bubble-pipeline-parallelism).
    """
    shift = 3 if p % 2 == 0 else 0  # keeps the passes of a stage apart
    offsets: list[tuple[int, Kind, int]] = [
        (2 * stage, FORWARD, 0),
        (3 * p - stage - 2, FORWARD, 1),
        (3 * p + shift + 2 * stage - 1, INPUT_GRADIENT, 1),
        (6 * p + shift - stage - 2, INPUT_GRADIENT, 0),
    ]
    at = {o + _PERIOD * i: Action(kind, i, c) for o, kind, c in offsets for i in range(micro_batches)}
    row, owed = list[Action](), deque[Unit]()
    for time in range(max(at) + 1):
        if time in at:
            row.append(at[time])
            owed.extend([at[time].unit] * (at[time].kind == INPUT_GRADIENT))
        elif owed:
            row.append(Action(WEIGHT_GRADIENT, *owed.popleft()))
    return [*row, *(Action(WEIGHT_GRADIENT, *unit) for unit in owed)]


SPEC = Spec(
    name="v-half",
    summary="two model chunks a stage, there and back, with backwards in two halves: half of 1f1b's memory",
    order=lambda size: [_row(size.stages, stage, size.micro_batches) for stage in range(size.stages)],
    bound=lambda size: min(2 * (size.stages // 2 + 1), 2 * size.micro_batches),
    places=lambda size: vee(size.stages),
    chunks=(2, 2),
    needs=frozenset(["chunks", "split", "vee"]),
    drawings=(
        Drawing(
            Size(4, 4),
            """
            F0 F1 F0.1 F2 D0.1 W0.1 F1.1 F3 D1.1 W1.1 F2.1 D0 D2.1 W0 F3.1 W2.1 D1 D3.1 W1 W3.1 D2 W2 D3 W3
            F0 F1 F0.1 F2 F1.1 D0.1 W0.1 F3 F2.1 D1.1 W1.1 D0 W0 F3.1 D2.1 W2.1 D1 W1 D3.1 W3.1 D2 W2 D3 W3
            F0 F0.1 F1 F1.1 F2 D0.1 W0.1 F2.1 F3 D0 D1.1 W0 F3.1 W1.1 D1 D2.1 W1 W2.1 D2 D3.1 W2 W3.1 D3 W3
            F0 F0.1 F1 F1.1 F2 F2.1 D0.1 W0.1 D0 W0 F3 F3.1 D1.1 W1.1 D1 W1 D2.1 W2.1 D2 W2 D3.1 W3.1 D3 W3
            """,
            "the building block of V-Half for 4 stages, repeated",
        ),
    ),
)
