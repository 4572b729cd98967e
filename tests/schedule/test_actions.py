"""The table of kinds is consistent, what treats actions by kind follows it, and the notation is one-to-one."""

from __future__ import annotations

import re
from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import (
    COMPUTE,
    DEPARTING,
    KINDS,
    OWN_ENDS,
    RECEIVING,
    SENDING,
    Action,
    Cost,
    Kind,
    LinkKind,
    parse,
)
from evenpipe.schedule.actions import DONE, FINISHING, STATES, UNKNOWN, State
from evenpipe.simulate import Costs

ROWS = list(KINDS.values())


def test_letters_names_and_colours_are_those_of_one_kind() -> None:
    assert tuple(KINDS) == get_args(Kind)
    assert all(letter == row.letter and re.fullmatch("[A-Z]", letter) for letter, row in KINDS.items())
    for values in ([row.name for row in ROWS], [row.colour for row in ROWS]):
        assert set(Counter(values).values()) == {1}
    assert all(re.fullmatch("#[0-9a-f]{6}", row.colour) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_kind_computes_or_moves_or_updates(row) -> None:
    assert [row.cost is not None, row.link is not None, row.of_batch].count(True) == 1
    assert (row.ticks > 0) == (row.cost is not None)
    assert (row.link is not None) == (row.sends or row.receives)
    assert row.direction == 0 or row.cost is not None
    assert bool(row.takes) != row.of_batch
    assert set(row.takes) | {row.leaves} <= set(STATES) == set(get_args(State))


def test_every_cost_and_every_link_belongs_to_a_kind() -> None:
    assert {row.cost for row in ROWS} - {None} == set(get_args(Cost)) == set(Costs((1.0,), (2.0,)).of(0)[0])
    links = {row.link for row in ROWS} - {None}
    assert links | {"forward", "backward"} == set(get_args(LinkKind))
    for link in links:
        assert {row.sends for row in ROWS if row.link == link} == {row.receives for row in ROWS if row.link == link}
        assert any(row.sends for row in ROWS if row.link == link)


def test_a_unit_comes_to_its_end_whichever_way_it_takes() -> None:
    """From every state that something leaves it in, some kind takes it on; forwards and guests start from unknown."""
    reached = {row.leaves for row in ROWS if not row.of_batch} | {UNKNOWN}
    assert reached == set(STATES)
    assert {state for row in ROWS for state in row.takes} == reached - {DONE}
    for guest in (False, True):
        frontier, seen = [(UNKNOWN, 0)], {(UNKNOWN, 0)}
        while frontier:
            state, held = frontier.pop()
            for row in ROWS:
                if state in row.takes and row.guest == guest and not row.of_batch:
                    after = row.leaves, held + row.held
                    frontier += [after] if after not in seen else []
                    seen.add(after)
        assert {held for state, held in seen if state == DONE} == {0}, "what is done is held no more"
        assert {held for _, held in seen} == {0, 1}


def test_the_halves_of_a_backward_are_the_whole() -> None:
    whole, halves = KINDS["B"], (KINDS["D"], KINDS["W"])
    assert whole.takes == halves[0].takes
    assert whole.leaves == halves[1].leaves
    assert halves[1].takes == (halves[0].leaves,)
    for part in ("direction", "held", "ticks"):
        assert getattr(whole, part) == sum(getattr(half, part) for half in halves)


def test_sets_of_kinds() -> None:
    assert "".join(sorted(COMPUTE)) == "BDFW"
    assert "".join(sorted(FINISHING)) == "BW"
    assert "".join(sorted(DEPARTING)) == "EOR"
    assert "".join(sorted(SENDING)) == "EIOR"
    assert "".join(sorted(RECEIVING)) == "AILO"
    assert "".join(sorted(OWN_ENDS)) == "IO"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_notation_follows_the_table(row) -> None:
    action = Action(row.letter, 7, 0 if row.of_batch else 2, 3 if row.guest else -1)
    assert parse(str(action)) == action
    with pytest.raises(ValueError, match="is no action"):
        parse(f"{row.letter}7" if row.guest else f"{row.letter}7@3")


def test_deepspeeds_instructions_follow_the_table() -> None:
    pytest.importorskip("deepspeed")
    from evenpipe.deepspeed import lowering

    names = {action.__name__ for action in lowering.ACTIONS}
    assert names == {row.name.title().replace(" ", "") for row in ROWS}


numbers = st.integers(0, 10**6)
actions = st.one_of(
    st.builds(Action, st.sampled_from("FBDWELOI"), numbers, numbers, st.just(-1)),
    st.builds(Action, st.sampled_from("AR"), numbers, numbers, numbers),
    st.builds(Action, st.just("U"), numbers, st.just(0), st.just(-1)),
)


@given(actions)
def test_parse_is_the_inverse_of_str(action):
    assert parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("F3", Action("F", 3)),
        ("B3.1", Action("B", 3, 1)),
        ("A3@0", Action("A", 3, 0, 0)),
        ("R12.2@5", Action("R", 12, 2, 5)),
        ("D3.1", Action("D", 3, 1)),
        ("W3", Action("W", 3)),
        ("O3", Action("O", 3)),
        ("I3.2", Action("I", 3, 2)),
        ("U7", Action("U", 7)),
    ],
)
def test_notation(text, action):
    assert parse(text) == action
    assert str(action) == text


@pytest.mark.parametrize(
    "text",
    ["", "F", "X3", "F3.", "F3@0", "A3", "F-1", "F3 ", "B3.1.1", "F03", "F3.0", "F٣", "U", "U1.1", "D3@0", "O3@0"],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="is no action"):
        parse(text)


def test_what_is_refused_is_shown_in_a_line_that_can_be_read():
    with pytest.raises(ValueError, match=r"^'\[{32}…' is no action: ") as refused:
        parse("[" * 100_000)
    assert len(str(refused.value)) < 200
