"""V-Half (Pipeline Parallelism with Controllable Memory, arXiv 2405.15362): chunks in a V, half of 1F1B's memory."""

from __future__ import annotations

from evenpipe.schedule.actions import FORWARD, INPUT_GRADIENT
from evenpipe.schedule.building_block import Pass, closed_up
from evenpipe.schedule.spec import Drawing, Size, Spec
from evenpipe.schedule.topology import vee

__all__ = ["SPEC"]


def _block(p: int, stage: int) -> list[Pass]:
    """V-Half's building block on one of p stages, at the offsets of the authors' code.

    They are those of ``stable_pattern_v_half`` in sail-sg/zero-bubble-pipeline-parallelism.
    """
    shift = 3 if p % 2 == 0 else 0  # keeps the passes of a stage apart
    return [
        Pass(2 * stage, FORWARD, 0),
        Pass(3 * p - stage - 2, FORWARD, 1),
        Pass(3 * p + shift + 2 * stage - 1, INPUT_GRADIENT, 1),
        Pass(6 * p + shift - stage - 2, INPUT_GRADIENT, 0),
    ]


SPEC = Spec(
    name="v-half",
    summary="two model chunks a stage, there and back, with backwards in two halves: half of 1f1b's memory",
    order=lambda size: closed_up([_block(size.stages, stage) for stage in range(size.stages)], size.micro_batches),
    bound=lambda size: min(2 * (size.stages // 2 + 1), 2 * size.micro_batches),
    places=lambda size: vee(size.stages),
    chunks=(2, 2),
    needs=frozenset(["chunks", "split", "vee"]),
    drawings=(
        Drawing(
            Size(4, 4),
            """
            F0 F1 F2 F0.1 D0.1 W0.1 F3 F1.1 D1.1 W1.1 F2.1 D0 D2.1 W0 F3.1 D3.1 W2.1 D1 W1 W3.1 D2 W2 D3 W3
            F0 F1 F0.1 F2 D0.1 F1.1 W0.1 F3 F2.1 D1.1 D0 W1.1 W0 F3.1 D2.1 D1 D3.1 W2.1 W1 D2 W3.1 D3 W2 W3
            F0 F0.1 F1 F2 F1.1 D0.1 W0.1 F2.1 F3 D0 D1.1 W0 F3.1 W1.1 D1 D2.1 W1 D3.1 D2 W2.1 D3 W2 W3.1 W3
            F0 F0.1 F1 F1.1 F2 F2.1 D0.1 W0.1 D0 W0 F3 F3.1 D1.1 D1 W1.1 W1 D2.1 D2 D3.1 D3 W2.1 W2 W3.1 W3
            """,
            "the building block of V-Half for 4 stages, repeated and closed up",
        ),
    ),
)
