"""V-Min (Pipeline Parallelism with Controllable Memory, arXiv 2405.15362): chunks in a V, a third of 1F1B's memory."""

from __future__ import annotations

from evenpipe.schedule.actions import FORWARD, INPUT_GRADIENT
from evenpipe.schedule.building_block import PERIOD, Pass, closed_up
from evenpipe.schedule.spec import Drawing, Size, Spec
from evenpipe.schedule.topology import vee

__all__ = ["SPEC"]


def _block(p: int, stage: int) -> list[Pass]:
    """V-Min's building block on one of p stages: each pass one pass after the stage before's (§3.2).

    Forwards of chunk 1 and input gradients of chunk 0 come at odd times, the others at even ones, relative to the
    stage: so they are apart. Input gradients wait two passes longer where they would meet a forward of their chunk.
    """
    back = 2 * p - 1
    returned = 2 * p + (2 if p % 3 == 0 else 0)
    done = returned + 2 * p - 1
    done += 2 if (done - back) % PERIOD == 0 else 0
    return [
        Pass(stage, FORWARD, 0),
        Pass(back - stage, FORWARD, 1),
        Pass(returned + stage, INPUT_GRADIENT, 1),
        Pass(done - stage, INPUT_GRADIENT, 0),
    ]


SPEC = Spec(
    name="v-min",
    summary="two model chunks a stage, there and back, with backwards in two halves: a third of 1f1b's memory",
    order=lambda size: closed_up([_block(size.stages, stage) for stage in range(size.stages)], size.micro_batches),
    bound=lambda size: 2 * min((size.stages + 4) // 3, size.micro_batches),
    places=lambda size: vee(size.stages),
    chunks=(2, 2),
    needs=frozenset(["chunks", "split", "vee"]),
    drawings=(
        Drawing(
            Size(4, 4),
            """
            F0 F1 F0.1 D0.1 W0.1 F2 F1.1 D1.1 D0 W1.1 F3 W0 F2.1 D2.1 W2.1 F3.1 D3.1 D1 W1 D2 W3.1 W2 D3 W3
            F0 F0.1 F1 D0.1 W0.1 F1.1 F2 D0 D1.1 W0 W1.1 F2.1 F3 D1 D2.1 W1 F3.1 D3.1 D2 W2.1 W2 D3 W3.1 W3
            F0 F0.1 F1 D0.1 F1.1 W0.1 D0 F2 W0 D1.1 F2.1 W1.1 D1 F3 W1 F3.1 D2.1 D2 D3.1 W2.1 D3 W2 W3.1 W3
            F0 F0.1 F1 F1.1 D0.1 D0 W0.1 W0 F2 F2.1 D1.1 D1 W1.1 W1 F3 F3.1 D2.1 D2 D3.1 D3 W2.1 W2 W3.1 W3
            """,
            "the building block of V-Min for 4 stages, repeated and closed up",
        ),
    ),
)
