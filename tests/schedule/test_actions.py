"""The notation is one-to-one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import Action, parse

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
