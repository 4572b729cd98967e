"""ZB-H1 (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, §2.1): 1F1B with a split backward, and its memory."""

from __future__ import annotations

from evenpipe.schedule.actions import Action
from evenpipe.schedule.spec import Drawing, Size, Spec, alternate, halved, units

__all__ = ["SPEC"]


def _order(size: Size) -> list[list[Action]]:
    """Weight gradients follow s input gradients later on stage s: every stage then holds p micro-batches at most."""
    every = units(size.micro_batches)
    return [list(halved(alternate(every, every, size.stages - s - 1), s)) for s in range(size.stages)]


SPEC = Spec(
    name="zb-h1",
    summary="1f1b with backwards in two halves: a third of its bubble, the same memory",
    order=_order,
    bound=lambda size: min(size.stages, size.micro_batches),
    needs=frozenset(["split"]),
    live=lambda size: [min(size.stages, size.micro_batches)] * size.stages,
    drawings=(
        Drawing(
            Size(4, 8),
            """
            F0 F1 F2 F3 D0 W0 F4 D1 W1 F5 D2 W2 F6 D3 W3 F7 D4 W4 D5 W5 D6 W6 D7 W7
            F0 F1 F2 D0 F3 D1 W0 F4 D2 W1 F5 D3 W2 F6 D4 W3 F7 D5 W4 D6 W5 D7 W6 W7
            F0 F1 D0 F2 D1 F3 D2 W0 F4 D3 W1 F5 D4 W2 F6 D5 W3 F7 D6 W4 D7 W5 W6 W7
            F0 D0 F1 D1 F2 D2 F3 D3 W0 F4 D4 W1 F5 D5 W2 F6 D6 W3 F7 D7 W4 W5 W6 W7
            """,
            "Zero Bubble Pipeline Parallelism, Figure 3 (top)",
        ),
    ),
)
