"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from evenpipe.schedule.actions import BACKWARD, FORWARD, Action
from evenpipe.schedule.spec import Drawing, Size, Spec

__all__ = ["SPEC"]


def _order(size: Size) -> list[list[Action]]:
    return [[Action(kind, i) for kind in (FORWARD, BACKWARD) for i in range(size.micro_batches)]] * size.stages


SPEC = Spec(
    name="gpipe",
    summary="all forwards, then all backwards",
    order=_order,
    bound=lambda size: size.micro_batches,
    live=lambda size: [size.micro_batches] * size.stages,
    drawings=(Drawing(Size(2, 3), "F0 F1 F2 B0 B1 B2\nF0 F1 F2 B0 B1 B2", "PipeDream-2BW Figure 3(a)"),),
)
