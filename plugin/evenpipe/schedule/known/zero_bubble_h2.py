"""ZB-H2 (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, §2.2): ZB-H1 with twice the warm-up and the memory.

With F = D = W and m ≥ 2p − 1, a stage never waits between its first forward and its last weight gradient. It starts and
ends one forward after the stage before, so batches follow each other without a bubble if no step waits for all stages.
The framework's optimizer steps: the paper's post-validation (§4), which undoes steps that should have been clipped or
skipped, is not part of this. Where a step needs all stages (a norm, a loss scale), p − 1 forwards of bubble remain, as
in ZB-H1.
"""

from __future__ import annotations

from evenpipe.schedule.actions import Action
from evenpipe.schedule.spec import Drawing, Size, Spec, alternate, halved, units

__all__ = ["SPEC"]


def _order(size: Size) -> list[list[Action]]:
    """Stage s runs 2(p − s − 1) forwards ahead; weight gradients follow 2s input gradients later.

    With fewer than 2p − 1 micro-batches they follow sooner, or they would come too late to fill the cool-down.
    """
    every, beyond = units(size.micro_batches), max(0, size.micro_batches - size.stages)
    return [
        list(halved(alternate(every, every, 2 * (size.stages - s - 1)), s + min(s, beyond))) for s in range(size.stages)
    ]


def _most(size: Size) -> int:
    return min(2 * size.stages - 1, size.micro_batches)


SPEC = Spec(
    name="zb-h2",
    summary="zb-h1 with twice the warm-up and the memory: no stage waits within a batch",
    order=_order,
    bound=_most,
    needs=frozenset(["split"]),
    live=lambda size: [_most(size)] * size.stages,
    drawings=(
        Drawing(
            Size(4, 8),
            """
            F0 F1 F2 F3 F4 F5 F6 D0 W0 F7 D1 W1 D2 W2 D3 W3 D4 W4 D5 W5 D6 W6 D7 W7
            F0 F1 F2 F3 F4 D0 F5 D1 F6 D2 W0 F7 D3 W1 D4 W2 D5 W3 D6 W4 D7 W5 W6 W7
            F0 F1 F2 D0 F3 D1 F4 D2 F5 D3 F6 D4 W0 F7 D5 W1 D6 W2 D7 W3 W4 W5 W6 W7
            F0 D0 F1 D1 F2 D2 F3 D3 F4 D4 F5 D5 F6 D6 W0 F7 D7 W1 W2 W3 W4 W5 W6 W7
            """,
            "by the text of Zero Bubble Pipeline Parallelism, §2.2",
        ),
    ),
)
