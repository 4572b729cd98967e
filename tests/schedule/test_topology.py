"""Where the model's parts are: positions, neighbours and links follow from one list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import (
    Action,
    Link,
    Message,
    Place,
    Places,
    Schedule,
    ScheduleError,
    Size,
    build,
    links,
    loop,
    lower,
    partner,
    vee,
)
from evenpipe.schedule.topology import parse_places


@st.composite
def placements(draw: st.DrawFn) -> Places:
    """Loops, vees, and whatever has each stage's chunks in the order of the model."""
    stages, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    mixed = draw(st.permutations([stage for stage in range(stages) for _ in range(chunks)]))
    order = tuple(Place(stage, mixed[:at].count(stage)) for at, stage in enumerate(mixed))
    return draw(st.sampled_from([loop(stages, chunks), vee(stages, chunks), Places(order)]))


def test_a_loop_goes_round() -> None:
    places = loop(3, 2)
    assert [str(place) for place in places.order] == ["0.0", "1.0", "2.0", "0.1", "1.1", "2.1"]
    assert (places.first, places.last) == (Place(0, 0), Place(2, 1))
    assert places.neighbour(2, 0, +1) == Place(0, 1)
    assert places.neighbour(2, 1, +1) is places.neighbour(0, 0, -1) is None
    assert str(places) == "loop"


def test_a_vee_turns_back() -> None:
    places = vee(3)
    assert [str(place) for place in places.order] == ["0.0", "1.0", "2.0", "2.1", "1.1", "0.1"]
    assert (places.first, places.last) == (Place(0, 0), Place(0, 1))
    assert places.neighbour(2, 0, +1) == Place(2, 1)
    assert str(places) == "vee"
    assert [place.stage for place in vee(2, 3).order] == [0, 1, 1, 0, 0, 1]


def test_one_row_is_a_loop_whatever_made_it() -> None:
    assert vee(4, 1) == loop(4)
    assert str(vee(4, 1)) == str(vee(1, 3)) == "loop"


@given(placements())
def test_positions_neighbours_and_ends_agree(places: Places) -> None:
    assert sorted(places.order) == [Place(s, c) for s in range(places.stages) for c in range(places.chunks)]
    for position, place in enumerate(places.order):
        assert places.position(*place) == position
        after = places.neighbour(*place, +1)
        assert after == (None if place == places.last else places.order[position + 1])
        assert after is None or places.neighbour(*after, -1) == place
    assert places.neighbour(*places.first, -1) is None


@given(placements())
def test_parse_is_the_inverse_of_str(places: Places) -> None:
    assert parse_places(str(places), places.stages, places.chunks) == places


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zigzag", "places=zigzag: expected loop, vee, or STAGE.CHUNK,STAGE.CHUNK,…"),
        ("", "places=: expected loop"),
        ("0.0,1.0,", "expected loop"),
        ("0.0,-1.0", "expected loop"),
        ("٠.0,1.0", "expected loop"),
        ("0.0,1.0,2.0", "are 3 stages × 1 chunks, not 2 × 1"),
        ("0.0,1.0,0.1,1.1", "are 2 stages × 2 chunks, not 2 × 1"),
        ("0.0,0.0", "each stage needs the same number of model chunks, in the order of the model"),
        ("0.1,1.0,0.0,1.1", "each stage needs the same number"),
        ("0.0,2.0", "each stage needs the same number"),
        ("0.0,1.0,0.1", "each stage needs the same number"),
        ("0.0,99999999999.0", "each stage needs the same number"),
    ],
)
def test_what_is_no_placement_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=r"^[^\n]*$") as refusal:
        parse_places(text, 2, 1)
    assert said in str(refusal.value)
    assert len(str(refusal.value)) < 200


def test_no_place_at_all_is_refused() -> None:
    with pytest.raises(ScheduleError, match="each stage needs the same number"):
        Places(())


@given(placements())
def test_what_one_part_sends_the_next_one_takes(places: Places) -> None:
    """Chunks are named as the receiver has them; a message is local where both parts are on one stage."""
    along = [(stage, Action("F", 0, chunk)) for stage, chunk in places.order]
    back = [(stage, Action(kind, 0, chunk)) for stage, chunk in reversed(places.order) for kind in "DW"]
    rows = tuple(tuple(a for at, a in (*along, *back) if at == stage) for stage in range(places.stages))
    program = lower(Schedule("one", places.stages, 1, places.chunks, 2 * places.chunks, rows, places=places))
    steps = {(stage, step.action): step for stage, row in enumerate(program.steps) for step in row}
    for one, other in zip(places.order, places.order[1:], strict=False):
        sent = steps[one.stage, Action("F", 0, one.chunk)].send
        assert sent == steps[other.stage, Action("F", 0, other.chunk)].takes
        assert sent == Message(Link("forward", one.stage, other.stage), 0, other.chunk)
        returned = steps[other.stage, Action("D", 0, other.chunk)].send
        assert returned == steps[one.stage, Action("D", 0, one.chunk)].takes
        assert returned == Message(Link("backward", other.stage, one.stage), 0, one.chunk)
        assert sent.is_local == (one.stage == other.stage)
    for (_, action), step in steps.items():
        assert action.kind != "W" or step.send is step.takes is None
    first, last = ((place.stage, place.chunk) for place in (places.first, places.last))
    assert steps[first[0], Action("F", 0, first[1])].takes is steps[first[0], Action("D", 0, first[1])].send is None
    assert steps[last[0], Action("D", 0, last[1])].takes is steps[last[0], Action("F", 0, last[1])].send is None


def test_links_join_neighbours_both_ways_and_pairs() -> None:
    assert list(map(str, links(loop(3)))) == ["forward 0→1", "backward 1→0", "forward 1→2", "backward 2→1"]
    assert list(map(str, links(loop(2, 2)))) == ["forward 0→1", "backward 1→0", "forward 1→0", "backward 0→1"]
    assert list(map(str, links(vee(2)))) == ["forward 0→1", "backward 1→0", "forward 1→0", "backward 0→1"]
    assert links(loop(1, 3)) == links(vee(1)) == ()
    assert list(map(str, links(loop(3), pairs=True)))[4:] == ["evict 0→2", "load 2→0"]


def test_both_ends_of_a_transfer_name_one_message() -> None:
    assert [partner(partner(stage, 5), 5) for stage in range(5)] == list(range(5))
    program = build("1f1b", Size(4, 8), bpipe=True, swaps=(1,))
    for row in program.steps:
        for step in row:
            kind, unit = step.action.kind, step.action.unit
            links = {"E": ("evict", 0, 3), "A": ("evict", 0, 3), "L": ("load", 3, 0), "R": ("load", 3, 0)}
            links |= {"O": ("swap out", 1, 1), "I": ("swap in", 1, 1)}
            assert step.transfer == (Message(Link(*links[kind]), *unit) if kind in links else None)
            assert step.transfer is None or step.transfer.is_local == (kind in "OI")
