"""A loop under a cap: its plan is what was saved, until it is forgotten."""

from __future__ import annotations

from evenpipe.schedule import Programs, Size
from evenpipe.tuner.swapping import SwapLoop

SIZE = Size(2, 4)
#: Of a stage: bytes held, ms a byte to the host and to the partner; of its chunk bytes saved, staying and of the first
#: micro-batch, times, and no layers that can be recomputed.
ROW = [100.0, 0.1, 0.0, 50.0, 5.0, 50.0, 1.0, 2.0, 0]
STATE = {
    "limit_bytes": 300,
    "measured": {"micro_batches": 4, "chunks": 1, "rows": [ROW, ROW]},
    "plans": [[list(SIZE), [["late", 0.5, 0, 0], ["none", 0.0, 0, 0]]]],
}


def test_a_plan_that_was_loaded_is_forgotten() -> None:
    loop = SwapLoop()
    loop.load_state_dict(STATE)
    assert not loop.weighs
    assert loop.state_dict() == STATE
    assert [way.level for way in loop.ways(Programs("1f1b"), SIZE)] == ["late", "none"]
    loop.forget()
    assert loop.weighs
    assert loop.state_dict() is None
