"""Waits are read off when actions started and ended, and other pipelines are simulated from the same times."""

from __future__ import annotations

import pytest

from evenpipe.report.bubbles import Alternative, Case, Room, alternatives, waits_in, with_messages
from evenpipe.schedule import Size, build
from evenpipe.simulate import Costs, Wire, simulate


@pytest.mark.parametrize(
    ("schedule", "bpipe", "chunks", "k"),
    [
        *[("1f1b", False, 1, 1), ("1f1b", True, 1, 1), ("kfkb", False, 1, 2), ("interleaved", False, 2, 1)],
        *[("zb-h1", False, 1, 1), ("v-half", False, 2, 1), ("gpipe", False, 1, 1)],
    ],
)
def test_all_that_a_stage_does_not_compute_is_a_wait_for_something(
    schedule: str, bpipe: bool, chunks: int, k: int
) -> None:
    program = build(schedule, Size(4, 8, chunks, k), bpipe)
    wire, slow = Wire(transmit_ms=0.5), Wire(transmit_ms=3.0)
    wires = {"forward": wire, "backward": wire, "evict": slow, "load": slow}
    found = simulate(program, Costs((2.0, 2.0, 3.0, 2.0), (4.0, 4.0, 5.0, 4.0), wires))
    waits = waits_in(program.schedule.places, found.timeline)
    for number, stage in enumerate(found.stages):
        told = sum(wait.total_ms for wait in waits.stages if wait.stage == number)
        assert told == pytest.approx(waits.batch_ms - stage.busy_ms, abs=0.01)


def test_a_gap_is_for_the_neighbour_that_computes_or_for_its_message() -> None:
    program = build("1f1b", Size(2, 4))
    costs = Costs((1.0, 1.0), (2.0, 2.0), {"backward": Wire(transmit_ms=0.75)})
    waits = waits_in(program.schedule.places, simulate(program, costs).timeline)
    backward = next(wait for wait in waits.stages if wait.stage == 0 and wait.reason == "backward")
    # Stage 0 forwards two, and waits for the first backward: computed at 1 + 1 + 2, there 0.75 later.
    assert (backward.source, backward.longest_ms) == (1, pytest.approx(2.75))
    assert waits.message_ms["backward", 1, 0] == pytest.approx(0.75)
    start = next(wait for wait in waits.stages if wait.stage == 1 and wait.reason == "start")
    assert start.total_ms == pytest.approx(1.0)


def test_what_a_partner_keeps_too_long_is_told_apart() -> None:
    program = build("1f1b", Size(4, 8), bpipe=True)
    slow = Wire(transmit_ms=5.0)
    costs = Costs((1.0,) * 4, (2.0,) * 4, {"evict": slow, "load": slow})
    waits = waits_in(program.schedule.places, simulate(program, costs).timeline)
    assert {wait.stage for wait in waits.stages if wait.reason == "transfer"} >= {0}


def test_a_remedy_is_what_the_simulator_says_of_it() -> None:
    program, wire = build("1f1b", Size(4, 12)), Wire(transmit_ms=50.0)
    costs = Costs((100.0,) * 4, (200.0,) * 4, {"forward": wire, "backward": wire})
    waits = waits_in(program.schedule.places, simulate(program, costs).timeline)
    # Without the wires: those are read off the timeline, as of a run.
    measured = with_messages(Costs(costs.forward_ms, costs.backward_ms), waits)
    present, *others = alternatives(Case(program.schedule, False, measured, None))
    assert present.batch_ms == pytest.approx(simulate(program, costs).makespan_ms, rel=0.01)
    grouped = next(one for one in others if one.flags == "--schedule kfkb --group-size 2")
    of_it = simulate(build("kfkb", Size(4, 12, group_size=2)), costs).makespan_ms
    assert grouped.batch_ms == pytest.approx(of_it, rel=0.01)
    assert present.batch_ms / grouped.batch_ms == pytest.approx(1.17, abs=0.03)
    assert others == sorted(others, key=lambda one: one.batch_ms)


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
