"""`verify` refuses what is wrong, marks where, and accepts nothing that cannot be carried out."""

import re
from dataclasses import replace

import pytest

from evenpipe.schedule import Action, Schedule, ScheduleError, parse, verify
from tests.schedules import build


def refused(rows, bound=None):
    with pytest.raises(ScheduleError) as refusal:
        verify(rows if isinstance(rows, Schedule) else Schedule.parse(rows, bound=bound))
    return str(refusal.value)


def test_missing_compute():
    assert "B1 is missing" in refused(["F0 F1 B0"])
    assert "F0 is missing" in refused(["F1 B1"])


def test_doubled_compute():
    assert "F0 finds its micro-batch forwarded already" in refused(["F0 F0 B0"])
    assert "B0 finds its micro-batch done already" in refused(["F0 B0 B0"])


def test_misordered_compute():
    assert "B0 finds its micro-batch not forwarded yet" in refused(["B0 F0"])


def test_a_circle_across_stages():
    assert "wait for one another in a circle" in refused(["F0 B0 F1 B1", "F0 F1 B0 B1"])


def test_ends_of_a_link_that_disagree():
    message = refused(["F0 F1 B0 B1", "F1 F0 B0 B1"])
    assert "the ends of link forward 0→1 disagree on message 0" in message
    assert "stage 0 sends micro-batch 0, stage 1 receives micro-batch 1" in message


def test_a_transfer_with_one_end():
    assert "link evict 0→3 disagree" in refused(["F0 E0 L0 B0", "F0 B0", "F0 B0", "F0 B0"])


def test_a_backward_that_is_not_resident():
    message = refused(["F0 E0 B0 L0", "F0 B0", "F0 B0", "A0@0 F0 B0 R0@0"])
    assert "B0 finds its micro-batch evicted" in message


def test_a_broken_bound():
    assert "F2 makes more than 2 live micro-batches" in refused(["F0 F1 F2 B0 B1 B2"], bound=2)


def test_transfers_between_strangers():
    assert "evicts on a stage that is no evictor" in refused(["F0 B0", "F0 E0 L0 B0"])
    assert "names an evictor that is not the partner" in refused(["F0 B0"] * 3 + ["A0@1 F0 B0 R0@1"])


def test_something_accepted_and_never_returned():
    assert "R0@0 is missing" in refused(["F0 B0", "F0 B0", "F0 B0", "A0@0 F0 B0"])


def test_a_micro_batch_out_of_range():
    schedule = build("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="F1 is not one of 1 micro-batches"):
        verify(replace(schedule, micro_batches=1))


@pytest.mark.parametrize("rows", [[], [""], ["", ""]])
def test_nothing_is_no_schedule(rows):
    with pytest.raises(ScheduleError, match="are no pipeline"):
        verify(Schedule.parse(rows))


def test_a_bound_of_zero_is_a_bound():
    assert "makes more than 0 live" in refused(["F0 B0"], bound=0)


def test_rows_that_do_not_fit_the_number_of_stages():
    schedule = build("1f1b", 4, 8)
    for stages in (2, 3, 5):
        with pytest.raises(ScheduleError, match=f"4 rows of actions, {stages} stages"):
            verify(replace(schedule, stages=stages))


def test_the_grid_marks_the_step():
    first, *grid = refused(["F0 F1 B0 B1", "F0 B1 F1 B0"]).splitlines()
    assert first == "schedule parsed, stage 1, step 1: B1 finds its micro-batch not forwarded yet"
    assert [re.sub(" +", " ", line) for line in grid] == [
        "step 0 1 2 3",
        "stage 0 F0 F1 B0 B1",
        "stage 1 F0 [B1] F1 B0 <-- here",
    ]


def test_a_large_grid_is_cut_to_the_neighbourhood():
    schedule = build("1f1b", 2, 500)
    row = list(schedule.actions[1])
    row[400], row[401] = row[401], row[400]
    with pytest.raises(ScheduleError) as refusal:
        verify(replace(schedule, actions=(schedule.actions[0], tuple(row))))
    assert all(len(line) < 200 for line in str(refusal.value).splitlines())


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("F0 O0 B0", "B0 finds its micro-batch swapped out"),
        ("O0 F0 B0", "O0 finds its micro-batch not forwarded yet"),
        ("F0 I0 B0", "I0 finds its micro-batch forwarded already"),
        ("F0 O0 I0 O0 I0 B0", "O0 finds its micro-batch loaded already"),
        ("F0 O0 D0 W0", "D0 finds its micro-batch swapped out"),
        ("F0 O0", "I0 is missing"),
        ("F0 D0", "W0 is missing"),
        ("F0 W0 D0", "W0 finds its micro-batch without its input gradient yet"),
        ("F0 D0 B0", "B0 finds its micro-batch with its input gradient done"),
        ("F0 B0 W0", "W0 finds its micro-batch done already"),
    ],
)
def test_swaps_and_halves_that_are_wrong(row, said):
    assert said in refused([row])


def test_swaps_and_halves_that_are_right():
    assert verify(Schedule.parse(["F0 O0 F1 D1 I0 D0 W1 W0", "F0 F1 O1 I1 B1 B0"], bound=2)).schedule.peak_live == (
        2,
        2,
    )


@pytest.mark.parametrize("wrong", [Action("F", -1), Action("B", -1), Action("F", 0, -1), Action("F", 0, 0, -2)])
def test_negative_numbers(wrong):
    rows = ((wrong, Action("B", 0)),)
    with pytest.raises(ScheduleError, match=r"is not one of 1 micro-batches|names an evictor"):
        verify(Schedule("parsed", 1, 1, 1, 1, rows))


@pytest.mark.parametrize("wrong", [Action("U", 0, 1), Action("U", 0, -1), Action("U", 0, 0, 0)])
def test_an_update_of_a_part(wrong):
    schedule = build("2bw", 1, 2)
    rows = ((*schedule.actions[0][:-1], wrong),)
    with pytest.raises(ScheduleError, match="names a part of a batch, and an update is of all of it"):
        verify(replace(schedule, actions=rows))


def with_row(schedule, stage, row):
    rows = list(schedule.actions)
    rows[stage] = tuple(row)
    return replace(schedule, actions=tuple(rows))


def edited(schedule, stage, edits):
    """``schedule`` with some words of one stage's row, each replaced by the words given for it."""
    words = [edits.get(str(action), str(action)) for action in schedule.actions[stage]]
    return with_row(schedule, stage, map(parse, " ".join(words).split()))


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
def test_updates_that_are_wrong(edits, said):
    for stage in range(4):
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


def test_updates_in_place():
    """With one weight version a stage updates after its own last backward of a batch, before the next one's first."""
    verify(Schedule.parse(["F0 F1 B0 B1 U0"]))
    assert "U0 comes before the last backward of batch 0" in refused(["F0 U0 B0"])
    row, head = "F0 B0 U0 F1 B1 U1", {"micro_batches": 1, "batches": 2, "bound": 4}
    verify(replace(Schedule.parse([row]), **head))
    for wrong, said in {
        "F0 F1 B0 B1 U0 U1": "B1 comes before U0, whose gradients its own would be added to",
        "F0 B0 U0 F1 B1": "U1 is missing",
        "F0 B0 U1 F1 B1 U0": "U1 comes where U0 was expected",
        "F0 F1 B0 U0 B1 U1": "B1 comes 1 updates after its forward; paci allows 0 on this stage",
    }.items():
        assert said in refused(replace(Schedule.parse([wrong]), **head))
