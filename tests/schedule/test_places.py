"""Where the model's parts are: positions, neighbours and links follow from one list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import Action, Link, Message, Place, Places, ScheduleError, links, loop, partner, vee
from evenpipe.schedule.places import parse_places
from evenpipe.schedule.topology import Routes, transfer


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
    routes = Routes(places)
    for one, other in zip(places.order, places.order[1:], strict=False):
        sent = routes.outgoing(Action("F", 3, one.chunk), one.stage)
        assert sent == routes.incoming(Action("F", 3, other.chunk), other.stage)
        assert sent == Message(Link("forward", one.stage, other.stage), 3, other.chunk)
        for kind in ("B", "D"):
            back = routes.outgoing(Action(kind, 3, other.chunk), other.stage)
            assert back == routes.incoming(Action(kind, 3, one.chunk), one.stage)
            assert back == Message(Link("backward", other.stage, one.stage), 3, one.chunk)
        assert sent.is_local == (one.stage == other.stage)
    for stage, chunk in places.order:
        weights = Action("W", 3, chunk)
        assert routes.outgoing(weights, stage) is routes.incoming(weights, stage) is None
    assert routes.incoming(Action("F", 3, places.first.chunk), places.first.stage) is None
    assert routes.outgoing(Action("F", 3, places.last.chunk), places.last.stage) is None
    assert routes.incoming(Action("B", 3, places.last.chunk), places.last.stage) is None
    assert routes.outgoing(Action("B", 3, places.first.chunk), places.first.stage) is None


def test_links_join_neighbours_both_ways_and_pairs() -> None:
    assert list(map(str, links(loop(3)))) == ["forward 0→1", "backward 1→0", "forward 1→2", "backward 2→1"]
    assert list(map(str, links(loop(2, 2)))) == ["forward 0→1", "backward 1→0", "forward 1→0", "backward 0→1"]
    assert list(map(str, links(vee(2)))) == ["forward 0→1", "backward 1→0", "forward 1→0", "backward 0→1"]
    assert links(loop(1, 3)) == links(vee(1)) == ()
    assert list(map(str, links(loop(3), pairs=True)))[4:] == ["evict 0→2", "load 2→0"]


@given(st.integers(1, 9), st.data())
def test_both_ends_of_a_transfer_name_one_message(stages: int, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    other = partner(stage, stages)
    assert partner(other, stages) == stage
    for mine, theirs, link in (("E", "A", ("evict", stage, other)), ("L", "R", ("load", other, stage))):
        moved = transfer(Action(mine, 2, 1), stage, stages)
        assert moved == transfer(Action(theirs, 2, 1, stage), other, stages) == Message(Link(*link), 2, 1)
    for kind, name in (("O", "swap out"), ("I", "swap in")):
        moved = transfer(Action(kind, 2, 1), stage, stages)
        assert moved == Message(Link(name, stage, stage), 2, 1)
        assert moved.is_local
