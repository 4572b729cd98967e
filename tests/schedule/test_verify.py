"""`verify` refuses what is wrong, marks where, and accepts nothing that cannot be carried out."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.schedule import Action, Schedule, ScheduleError, lower, verify
from evenpipe.simulate import Costs, Wire, simulate
from tests.schedule.weight_versions import replay
from tests.schedules import build


def refused(rows, bound=None):
    with pytest.raises(ScheduleError) as refusal:
        verify(Schedule.parse(rows, bound=bound))
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


valid = st.one_of(
    st.builds(build, st.just("gpipe"), st.integers(1, 4), st.integers(1, 5)),
    st.builds(build, st.just("1f1b"), st.integers(2, 6), st.integers(1, 10), st.just(1), st.booleans()),
    st.sampled_from([build("interleaved", p, p * g, v, True) for p in (2, 4) for g in (1, 2) for v in (2, 3)]),
    st.sampled_from([build("2bw", p, p + more, bpipe=p > 3, batches=3) for p in (2, 3, 4) for more in (0, 1)]),
)


@st.composite
def edited(draw):
    """A valid schedule with one action swapped, dropped, doubled, or retargeted."""
    schedule = draw(valid)
    stage = draw(st.integers(0, schedule.stages - 1))
    row = list(schedule.actions[stage])
    at = draw(st.integers(0, len(row) - 1))
    match draw(st.sampled_from(["swap", "drop", "double", "retarget"])):
        case "swap":
            other = draw(st.integers(0, len(row) - 1))
            row[at], row[other] = row[other], row[at]
        case "drop":
            del row[at]
        case "double":
            row.insert(draw(st.integers(0, len(row))), row[at])
        case "retarget":
            kind = draw(st.sampled_from("FBELARU"))
            evictor = draw(st.integers(0, schedule.stages - 1)) if kind in "AR" else -1
            micro_batch = draw(st.integers(0, schedule.micro_batches * schedule.batches))
            chunk = 0 if kind == "U" else draw(st.integers(0, schedule.chunks))
            row[at] = Action(kind, micro_batch, chunk, evictor)
    rows = list(schedule.actions)
    rows[stage] = tuple(row)
    return schedule, replace(schedule, actions=tuple(rows))


def is_really_valid(schedule):
    """An independent judge: replay the actions one by one, the transfers by what each stage then has in hand."""
    held = [{} for _ in range(schedule.stages)]  # stage -> {(owner stage, unit)}: what is live, own and accepted
    for stage, row in enumerate(schedule.actions):
        done = set()
        for action in row:
            unit, mine = action.unit, (stage, action.unit)
            if action.kind == "U":
                if schedule.name != "2bw":
                    return False
            elif action.kind == "F":
                held[stage][mine] = True
            elif action.kind == "B":
                if not held[stage].pop(mine, False):
                    return False
                done.add(unit)
            elif action.kind == "E":
                if not held[stage].pop(mine, False):
                    return False
            elif action.kind == "L":
                held[stage][mine] = True
            elif action.kind == "A":
                held[stage][action.evictor, unit] = True
            elif not held[stage].pop((action.evictor, unit), False):
                return False
        if len(done) != schedule.micro_batches * schedule.batches * schedule.chunks or held[stage]:
            return False
        if schedule.name == "2bw":
            replay(row, schedule.micro_batches)
    return True


@settings(max_examples=600)
@given(edited())
def test_an_edited_schedule_is_refused_or_really_valid(pair):
    """Refused, or it simulates to the end with everything computed, resident in time, and within the bound."""
    original, candidate = pair
    try:
        verify(candidate)
    except ScheduleError:
        return
    assert is_really_valid(candidate)
    wires = {"forward": Wire(0.1, 0.2), "backward": Wire(0.1, 0.2), "evict": Wire(0.0, 0.5), "load": Wire(0.0, 0.5)}
    costs = Costs((1.0,) * candidate.stages, (2.0,) * candidate.stages, wires)
    simulation = simulate(lower(candidate), costs)
    assert max(stage.peak_live for stage in simulation.stages) <= candidate.bound
    computed = sum(action.kind in "FB" for row in candidate.actions for action in row)
    assert computed == 2 * candidate.stages * candidate.micro_batches * candidate.batches * candidate.chunks
    assert {a for row in candidate.actions for a in row} == {a for row in original.actions for a in row}
