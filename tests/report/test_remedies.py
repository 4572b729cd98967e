"""What alternatives need of a stage's memory, beside how fast they are."""

from __future__ import annotations

from evenpipe.report.bubbles import Alternative, Case, Room, alternatives
from evenpipe.schedule import Size, build
from evenpipe.simulate import Costs

#: Stage 0 has the most micro-batches, stage 3 the most weights.
_ROOM = Room((1000, 1000, 1000, 1500), (100, 100, 100, 300))


def simulated(room: Room | None, bpipe: bool = False, **more: bool) -> dict[str, Alternative]:
    """By what they are called; 1F1B's stage s keeps 4 - s micro-batches of 100 bytes."""
    program = build("1f1b", Size(4, 8), bpipe)
    costs = Costs((1.0, 1.0, 1.0, 2.0), (2.0, 2.0, 2.0, 4.0))
    case = Case(program.schedule, bpipe, costs, [[100]] * 4, room=room, **more)
    return {one.text: one for one in alternatives(case)}


def test_what_is_needed_is_what_is_saved_and_what_stays_and_further_versions() -> None:
    found = simulated(_ROOM)
    assert found["as it is"].needs == max(1000 + 400, 1500 + 100)
    assert found["kfkb, k=2"].needs == max(1000 + 800, 1500 + 200)
    late = found["2bw, gradients a batch late"]
    assert (late.versions, late.version_bytes) == (2, 300)
    assert late.needs == max(1000 + 400 + 100, 1500 + 100 + 300)


def test_what_needs_more_than_the_limit_does_not_fit() -> None:
    found = simulated(_ROOM._replace(limit_bytes=1790))
    assert found["as it is"].fits
    assert found["twice as many micro-batches"].fits
    assert not found["kfkb, k=2"].fits
    assert not found["2bw, gradients a batch late"].fits
    assert all(one.fits for one in simulated(_ROOM).values()), "no limit is known"
    assert {one.needs for one in simulated(None).values()} == {None}


def test_a_schedule_that_cannot_be_levelled_says_so() -> None:
    assert "zb-h1 without BPipe" in simulated(_ROOM, bpipe=True)
    assert "zb-h1" in simulated(_ROOM)


def test_what_is_divided_as_well_as_it_can_be_is_not_divided_anew() -> None:
    assert "stages of equal times" in simulated(_ROOM)
    assert "stages of equal times" not in simulated(_ROOM, divided=True)
