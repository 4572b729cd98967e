"""kFkB is k copies of 1F1B, cross-merged (Ada-Grouper §5.4), and BPipe levels it like any other order."""

from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import COMPUTE, Action
from tests.schedules import build

sizes = st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 8))
pipelines = st.tuples(st.integers(2, 9), st.integers(1, 60), st.integers(1, 8))


def optimum(p, k):
    """Half of k(p + 1), what the two of a pair hold together, and half a micro-batch for the one under way."""
    return -(-(k * (p + 1) + 1) // 2)


@given(st.integers(1, 12), st.integers(1, 40))
def test_k_1_is_1f1b_action_for_action(p, m):
    assert build("kfkb", p, m, group_size=1).actions == build("1f1b", p, m).actions
    if p > 1:
        assert build("kfkb", p, m, group_size=1, bpipe=True).actions == build("1f1b", p, m, bpipe=True).actions


@given(st.integers(1, 9), st.integers(1, 30), st.integers(0, 30))
def test_k_of_m_and_more_is_gpipe_action_for_action(p, m, more):
    schedule = build("kfkb", p, m, group_size=m + more)
    assert schedule.actions == build("gpipe", p, m).actions
    assert schedule.group_size == m


@given(sizes)
def test_stage_s_holds_k_times_p_minus_s(size):
    p, m, k = size
    schedule = build("kfkb", p, m, group_size=k)
    assert schedule.peak_live == tuple(min(k * (p - s), m) for s in range(p))


@given(sizes)
def test_each_of_the_k_copies_is_in_the_order_of_1f1b(size):
    """Copy j has the micro-batches j, j + k, j + 2k ..; where k does not divide m, the last copies have one fewer."""
    p, m, k = size
    schedule = build("kfkb", p, m, group_size=k)
    for j in range(min(k, m)):
        micro_batches = range(j, m, k)
        copy = build("1f1b", p, len(micro_batches))
        for row, of_copy in zip(schedule.actions, copy.actions, strict=True):
            projected = [action for action in row if action.micro_batch in micro_batches]
            assert projected == [Action(a.kind, micro_batches[a.micro_batch]) for a in of_copy]


@given(sizes)
def test_the_copies_take_turns(size):
    """All copies do an action of theirs before one of them does its next: groups of k alike, the last one smaller."""
    p, m, k = size
    for row in build("kfkb", p, m, group_size=k).actions:
        for first in range(0, m, k):
            group = range(first, min(first + k, m))
            for kind in "FB":
                at = row.index(Action(kind, first))
                assert row[at : at + len(group)] == tuple(Action(kind, micro_batch) for micro_batch in group)


@given(pipelines)
def test_bpipe_keeps_its_bound_and_the_order(size):
    p, m, k = size
    plain, level = build("kfkb", p, m, group_size=k), build("kfkb", p, m, group_size=k, bpipe=True)
    assert level.bound == min(optimum(p, min(k, m)), plain.bound)
    for row, levelled in zip(plain.actions, level.actions, strict=True):
        assert tuple(action for action in levelled if action.kind in COMPUTE) == row


@given(pipelines)
def test_only_stages_above_the_bound_evict_and_only_to_their_partners(size):
    p, m, k = size
    level = build("kfkb", p, m, group_size=k, bpipe=True)
    for stage, row in enumerate(level.actions):
        assert (level.evictions[stage] > 0) == (min(k * (p - stage), m) > level.bound)
        assert {action.evictor for action in row if action.kind in "AR"} <= {p - 1 - stage}


def test_bpipe_halves_what_2f2b_holds():
    level = build("kfkb", 8, 32, group_size=2, bpipe=True)
    assert build("kfkb", 8, 32, group_size=2).peak_live == (16, 14, 12, 10, 8, 6, 4, 2)
    assert level.bound == 10
    assert max(level.peak_live) == 10
