"""`verify` refuses updates that come too early, too late, twice, never, or where stages would wait for ever."""

from dataclasses import replace

import pytest

from evenpipe.schedule import Schedule, ScheduleError, parse, verify
from tests.schedules import build


def with_row(schedule, stage, row):
    rows = list(schedule.actions)
    rows[stage] = tuple(row)
    return replace(schedule, actions=tuple(rows))


def edited(schedule, stage, edits):
    """``schedule`` with some words of one stage's row, each replaced by the words given for it."""
    words = [edits.get(str(action), str(action)) for action in schedule.actions[stage]]
    return with_row(schedule, stage, map(parse, " ".join(words).split()))


def refused(schedule):
    with pytest.raises(ScheduleError) as refusal:
        verify(schedule)
    return str(refusal.value)


STREAM = build("2bw", 4, 5, batches=4)


@pytest.mark.parametrize("stage", range(4))
def test_an_update_stands_between_its_batchs_last_backward_and_the_first_forward_on_its_weights(stage):
    """U1 of five micro-batches a batch: after B9, before F15 on W(2); everywhere else it is refused."""
    rest = [action for action in STREAM.actions[stage] if str(action) != "U1"]
    earliest, latest = rest.index(parse("B9")), rest.index(parse("F15"))
    for at in range(len(rest) + 1):
        moved = with_row(STREAM, stage, [*rest[:at], parse("U1"), *rest[at:]])
        if earliest < at <= latest:
            assert verify(moved).schedule is moved
        elif at <= earliest:
            assert "U1 comes" in refused(moved)
        else:
            assert "F15 needs weight version 2, which is not there yet" in refused(moved)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ({"U1": "", "B9": "U1 B9"}, "U1 comes before the last backward of batch 1"),
        ({"U1": "", "F15": "F15 U1"}, "F15 needs weight version 2, which is not there yet"),
        ({"U1": ""}, "F15 needs weight version 2, which is not there yet"),
        ({"U2": ""}, "U3 comes where U2 was expected"),
        ({"U3": ""}, "U3 is missing"),
        ({"U1": "U1 U1"}, "U1 comes where U2 was expected"),
        ({"U3": "U3 U4"}, "U4 is the update of none of 4 batches"),
        ({"U0": "U1", "U1": "U0"}, "U1 comes where U0 was expected"),
    ],
)
def test_updates_that_are_wrong(stage, edits, said):
    first, *grid = refused(edited(STREAM, stage, edits)).splitlines()
    assert first.startswith(f"schedule 2bw, stage {stage}, step ")
    assert said in first
    assert grid[1 + stage].endswith("<-- here")


def test_a_backward_after_the_update_that_overwrites_its_weights():
    """U1 writes W(2) over W(0), on which batch 1 runs."""
    late = edited(STREAM, 3, {"B9": "", "U1": "U1 B9"})
    assert "U1 comes before the last backward of batch 1" in refused(late)


def test_an_update_that_waits_for_what_it_keeps_from_happening():
    """Stage 0 cannot end a batch before its partner has returned micro-batches, so the partner must not wait for it."""
    levelled = build("2bw", 6, 6, bpipe=True, batches=3)
    early = edited(levelled, 5, {"U0": "", "B5": "B5 U0"})
    assert "the stages wait for one another in a circle" in refused(early)


def test_more_in_flight_than_2bw_allows():
    schedule = replace(Schedule.parse(["F0 F1 B0 B1 U0"] * 2, bound=2), weight_versions=2)
    assert "stage 1 has 2 micro-batches in flight; 2bw allows 1" in refused(schedule)


def test_only_2bw_updates():
    assert "U0 is an update, and only streams of batches have them" in refused(Schedule.parse(["F0 B0 U0"]))
