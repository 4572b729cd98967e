"""The BPipe pass is Algorithm 1 on 1F1B, Appendix A on interleaved 1F1B, and keeps its bound everywhere else."""

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import (
    BACKWARD,
    COMPUTE,
    EVICT,
    FORWARD,
    INPUT_GRADIENT,
    LOAD,
    WEIGHT_GRADIENT,
    Action,
    Schedule,
    ScheduleError,
    balance,
    lower,
    verify,
)
from evenpipe.simulate import Costs, Wire, simulate
from tests.schedules import build

FIGURE_4 = """
F0 F1 E1 F2 F3 E3 B0 L1 F4 B1 F5 E5 B2 L3 F6 B3 F7 B4 L5 B5 B6 B7
F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
"""


def optimum(stages):
    """μ_opt of §3.3."""
    return -(-(stages + 2) // 2)


def algorithm_1(row, p, s, m):
    """The paper's Algorithm 1 for stage s, of compute ``row``, line by line: T_i before C_i, without bubbles.

    Line 22 reads C_{i-3}.idx, which is a bubble at the first steady eviction: a bubble carries the index of the last
    forward before it, which gives the evictions of Figure 4.
    """
    compute = [(a.kind, a.micro_batch) for a in row]
    schedule, last_forward = [], None
    for i, (kind, index) in enumerate(compute):
        if kind == BACKWARD and i and (index == 0 or compute[i - 1][0] == BACKWARD):
            schedule.append(("BUBBLE", last_forward))
        if kind == FORWARD:
            last_forward = index
        schedule.append((kind, index))
    mu_opt = optimum(p)  # 3
    n_evict = min(p - s, m) - mu_opt  # 4
    evicted, transfers = set(), {}  # 5, 6
    for i, (kind, index) in enumerate(schedule):  # 7
        if kind == FORWARD:  # 8
            if mu_opt - 1 <= index < mu_opt - 1 + n_evict:  # 9
                transfers[i] = (EVICT, schedule[i - 1][1])  # 11
                evicted.add(schedule[i - 1][1])  # 12
        elif kind == BACKWARD and index in evicted:  # 14, 16
            transfers[i - 1] = (LOAD, index)  # 17
            evicted.discard(index)  # 18
            if schedule[i - 1][0] == FORWARD:  # 19
                transfers[i - 2] = (EVICT, schedule[i - 3][1])  # 22
                evicted.add(schedule[i - 3][1])  # 23
    merged = []
    for i, decision in enumerate(schedule):
        merged += [transfers[i]] if i in transfers else []
        merged += [decision] if decision[0] != "BUBBLE" else []
    return merged


def evictions_in_place(actions):
    """Without loads: evictions between the compute actions that they come between."""
    return [action for action in actions if action[0] != LOAD]


def loads(actions):
    """Of each load, in order: what it loads, and how many compute actions come before it."""
    places = accumulate(kind in COMPUTE for kind, _ in actions)
    return [(index, place) for (kind, index), place in zip(actions, places, strict=True) if kind == LOAD]


@pytest.mark.parametrize("stages", [*range(2, 9), 11, 16])
def test_reproduces_algorithm_1(stages):
    """Where loads wait for nothing. Where they wait for their room, the same ones start there or earlier."""
    for micro_batches in numbers_of_micro_batches(stages):
        plain = build("1f1b", stages, micro_batches)
        printed, early = (balance(plain, optimum(stages), queues) for queues in ("one", "many"))
        for stage in range(stages // 2):
            papers = algorithm_1(plain.actions[stage], stages, stage, micro_batches)
            ours, earlier = (
                [(action.kind, action.micro_batch) for action in schedule.actions[stage]]
                for schedule in (printed, early)
            )
            assert ours == papers, (stage, micro_batches)
            assert evictions_in_place(earlier) == evictions_in_place(papers), (stage, micro_batches)
            for (earlier_is, at), (papers_is, no_later) in zip(loads(earlier), loads(papers), strict=True):
                assert earlier_is == papers_is, (stage, micro_batches)
                assert at <= no_later, (stage, micro_batches)


def numbers_of_micro_batches(p):
    """All up to 3p; of longer pipelines those around which something changes."""
    return range(1, 3 * p + 1) if p <= 6 else (1, p // 2, p // 2 + 1, p // 2 + 2, p - 1, p, p + 1, 2 * p, 3 * p)


def test_figure_4():
    schedule = build("1f1b", 4, 8, bpipe=True, queues="one")
    assert str(schedule).splitlines()[1:4] == FIGURE_4.strip().splitlines()
    assert schedule.bound == 3
    assert schedule.evictions == (3, 0, 0, 0)
    # The innermost pair already satisfies the bound (§3.3): stage 2 holds its own two.
    assert schedule.peak_live == (3, 3, 2, 3)


@given(st.integers(2, 24), st.integers(1, 80))
def test_1f1b_stays_within_the_optimum(stages, micro_batches):
    schedule = build("1f1b", stages, micro_batches, bpipe=True)
    assert schedule.bound == min(optimum(stages), stages, micro_batches)
    assert max(schedule.peak_live) <= optimum(stages)


@given(st.integers(2, 24), st.integers(1, 80))
def test_partners_that_satisfy_the_bound_do_not_trade(stages, micro_batches):
    schedule = build("1f1b", stages, micro_batches, bpipe=True)
    for stage, evictions in enumerate(schedule.evictions):
        assert (evictions > 0) == (min(stages - stage, micro_batches) > optimum(stages))


def test_figure_10():
    """p=4, m=8, v=2: μ_opt is 9 and stage 0 evicts two (Appendix A)."""
    schedule = build("interleaved", 4, 8, 2, bpipe=True)
    assert schedule.bound == 9
    assert schedule.evictions == (2, 0, 0, 0)
    assert max(schedule.peak_live) == 9


@given(st.integers(2, 9), st.integers(1, 5), st.integers(2, 5))
def test_interleaved_meets_appendix_a(stages, groups, chunks):
    schedule = build("interleaved", stages, stages * groups, chunks, bpipe=True)
    assert schedule.bound == min(stages * chunks + 1, build("interleaved", stages, stages * groups, chunks).bound)
    assert max(schedule.peak_live) <= stages * chunks + 1


@given(st.integers(2, 10), st.integers(1, 30), st.data())
def test_any_bound_that_leaves_room_for_a_pair_is_kept(stages, micro_batches, data):
    """The pass takes any bound from the optimum up, and gives back the order itself once nothing has to move."""
    plain = build("1f1b", stages, micro_batches)
    bound = data.draw(st.integers(optimum(stages), stages + 2))
    balanced = verify(balance(plain, bound)).schedule
    assert max(balanced.peak_live) <= bound
    if bound >= max(plain.peak_live):
        assert balanced.actions == plain.actions


def test_a_middle_stage_trades_with_nobody():
    assert not any(action.kind in "ELAR" for action in build("1f1b", 9, 30, bpipe=True).actions[4])


@pytest.mark.parametrize(("queues", "earliest"), [("one", 2), ("many", 3), ("synchronised", 3)])
def test_a_load_starts_one_action_before_its_backward_or_beside_the_eviction_before(queues, earliest):
    """With one queue what waits for room would hold up the compute behind it."""
    positions = set()
    for row in build("1f1b", 16, 48, bpipe=True, queues=queues).actions:
        for position, action in enumerate(row):
            if action.kind == LOAD:
                compute = [later for later in row[position:] if later.kind in COMPUTE]
                positions.add(compute.index(Action(BACKWARD, *action.unit)) + 1)
    assert max(positions) == earliest


@pytest.mark.parametrize("stages", [4, 8, 11])
@pytest.mark.parametrize("name", ["1f1b", "2bw"])
def test_transfers_of_one_and_a_half_forwards_cost_nothing(name, stages):
    """Evict and load share the time of a backward and a forward (Appendix B, Equations 10 to 12)."""
    transfer = Wire(0, 1.5)
    times = Costs((1.0,) * stages, (2.0,) * stages, {"evict": transfer, "load": transfer})
    plain, level = (simulate(lower(build(name, stages, 3 * stages, bpipe=bpipe)), times) for bpipe in (False, True))
    assert level.makespan_ms <= 1.001 * plain.makespan_ms
    assert max(stage.peak_live for stage in level.stages) <= optimum(stages)


@pytest.mark.parametrize("stages", [*range(2, 9), 11, 16])
def test_an_acceptor_has_memory_for_its_guests_beside_its_own_peak(stages):
    """Its pool stays allocated while its own micro-batches come and go, so the two together keep the bound."""
    for micro_batches in numbers_of_micro_batches(stages):
        schedule = build("1f1b", stages, micro_batches, bpipe=True)
        for steps in lower(schedule).steps[(stages + 1) // 2 :]:
            own = own_most = guests = guests_most = 0
            for step in steps:
                guests -= sum(message.link.kind == "load" for message in (*step.complete, *step.follows))
                guests += step.action.kind == "A"
                own += step.action.kind == FORWARD
                own_most, guests_most = max(own_most, own), max(guests_most, guests)
                own -= step.action.kind == BACKWARD
            assert own_most + guests_most <= schedule.bound


@pytest.mark.parametrize("stages", [4, 5, 6, 7, 8, 12])
def test_transfers_shorter_than_a_forward_cost_nothing(stages):
    """An acceptor must not stand still until a return is through only because the next accept comes too early."""
    times = Costs((1.0,) * stages, (2.0,) * stages, {"evict": Wire(0, 0.95), "load": Wire(0, 0.95)})
    for micro_batches in (stages, 2 * stages, 5 * stages):
        plain = simulate(lower(build("1f1b", stages, micro_batches)), times)
        level = simulate(lower(build("1f1b", stages, micro_batches, bpipe=True)), times)
        assert level.makespan_ms == pytest.approx(plain.makespan_ms)


def test_an_impossible_bound_is_refused():
    plain = Schedule.parse(["F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"])
    with pytest.raises(ScheduleError, match="bound=1: stage 0 cannot hold fewer than 2"):
        balance(plain, 1)


@given(st.integers(2, 10), st.integers(1, 30))
def test_backwards_in_halves_keep_the_bound_too(stages, micro_batches):
    """A unit is there until its weight gradient: 1F1B's orders, with halves one behind the other."""
    plain = build("1f1b", stages, micro_batches)
    halves = {BACKWARD: (INPUT_GRADIENT, WEIGHT_GRADIENT)}
    rows = tuple(
        tuple(Action(kind, a.micro_batch) for a in row for kind in halves.get(a.kind, (a.kind,)))
        for row in plain.actions
    )
    schedule = balance(replace(plain, actions=rows), min(optimum(stages) + 1, plain.bound))
    verify(schedule, pairs=True)
    assert max(schedule.peak_live) <= schedule.bound


def test_stages_may_have_bounds_of_their_own():
    plain = build("1f1b", 6, 12)
    schedule = balance(plain, (3, 4, 4, 4, 4, 5))
    verify(schedule, pairs=True)
    assert all(live <= bound for live, bound in zip(schedule.peak_live, (3, 4, 4, 4, 4, 5), strict=True))
    assert schedule.evictions[0] > balance(plain, 4).evictions[0]
    assert Schedule.parse(str(schedule)) == schedule
    with pytest.raises(ScheduleError, match=r"(?s)F\d+ makes more than 2 live micro-batches.*stage 0 .*<-- here"):
        verify(replace(schedule, bounds=(2, 4, 4, 4, 4, 5)), pairs=True)


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ("2,3", "bounds=2,3: expected a number from 1 a stage, such as 3,4"),
        ("3,4,4,4,4,0", "bounds=3,4,4,4,4,0: expected a number from 1 a stage"),
        ("3,4,4,4,4,4", "bounds=3,4,4,4,4,4: the largest is not bound=5"),
    ],
)
def test_bounds_that_cannot_be(bounds, said):
    text = str(balance(build("1f1b", 6, 12), (3, 4, 4, 4, 4, 5)))
    with pytest.raises(ScheduleError, match=f"line 1: {said}"):
        Schedule.parse(text.replace("bounds=3,4,4,4,4,5", f"bounds={bounds}"))
