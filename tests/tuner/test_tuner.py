"""The choice among candidates: by estimates, with hysteresis, and looked at again when it is time."""

import json
import math
import random
from itertools import chain
from statistics import fmean

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evenpipe.schedule import Programs, links, loop
from evenpipe.tuner import pace
from evenpipe.tuner.grouped import Candidate, GroupedSchedule, StageTimes, estimate_ms
from evenpipe.tuner.tuner import HYSTERESIS, Tuner, thinned_out

STAGES = 4
SCHEDULE = GroupedSchedule(Programs("kfkb"), STAGES)
# A group of one, of large micro-batches, computes faster; groups hide messages.
CANDIDATES = (Candidate(1, 4, 6), Candidate(2, 2, 12), Candidate(4, 1, 24))
TIMES = {b: StageTimes((20.0 + 20 * b,) * STAGES, (40.0 + 40 * b,) * STAGES) for b in (1, 2, 4)}


def tuned(message_ms_a_sample: float, tuner: Tuner | None = None, iteration: int = 0) -> Tuner:
    """After a decision on a network on which messages take so long."""
    tuner = Tuner(SCHEDULE, CANDIDATES, TIMES, 3) if tuner is None else tuner
    for candidate in tuner.candidates:
        for link in links(loop(STAGES)):
            tuner.observe(candidate, link, [message_ms_a_sample * candidate.b] * 5)
    tuner.adopt(iteration, *tuner.decide(iteration))
    return tuner


def best(message_ms: float) -> Candidate:
    def milliseconds(candidate: Candidate) -> float:
        program = SCHEDULE.program(candidate)
        return estimate_ms(program, TIMES[candidate.b], dict.fromkeys(links(loop(STAGES)), message_ms * candidate.b))

    return min(CANDIDATES, key=milliseconds)


@pytest.mark.parametrize("message_ms", [0, 5, 20, 50])
def test_the_best_is_chosen(message_ms):
    assert tuned(message_ms).current == best(message_ms)


def test_the_network_decides():
    tuner = tuned(0)
    quiet = tuner.current
    assert tuned(60, tuner, 3).current != quiet
    assert tuned(0, tuner, 6).current == quiet
    assert [(retune.iteration, retune.k) for retune in tuner.retunes] == [(0, quiet.k), (3, best(60).k), (6, quiet.k)]
    assert tuner.retunes[0].estimates_ms.keys() == {"k1b4", "k2b2", "k4b1"}


@given(st.lists(st.floats(0, 80), min_size=2, max_size=5))
def test_no_switch_for_little(networks):
    tuner = None
    for number, message_ms in enumerate(networks):
        before = None if tuner is None else tuner.current
        tuner = tuned(message_ms, tuner, 3 * number)
        estimates = tuner.retunes[-1].estimates_ms
        if before is not None and before != tuner.current:
            assert estimates[tuner.current.name] <= (1 - HYSTERESIS) * estimates[before.name]
        else:
            assert estimates[tuner.current.name] * (1 - HYSTERESIS) <= 1.005 * min(estimates.values())


LEVELLED = GroupedSchedule(Programs("kfkb", True), STAGES)


def levelled(transfer_ms):
    """After a decision with BPipe on links that are free, but for those of pairs."""
    tuner = Tuner(LEVELLED, [Candidate(k, 1, 8) for k in range(1, 9)], {1: TIMES[1]}, None)
    neighbours = links(loop(STAGES))
    for candidate in tuner.candidates:
        for link in links(loop(STAGES), pairs=True)[len(neighbours) :]:
            tuner.observe(candidate, link, [transfer_ms])
    tuner.adopt(0, *tuner.decide(0))
    return tuner


def test_a_group_size_without_slow_evictions_is_chosen():
    fast, slow = levelled(1), levelled(300)
    for candidate in fast.candidates:
        found = [tuner.retunes[0].estimates_ms[candidate.name] for tuner in (fast, slow)]
        assert (found[0] < found[1]) == any(LEVELLED.program(candidate).schedule.evictions)
    assert fast.current.k == 1
    assert any(LEVELLED.program(fast.current).schedule.evictions)
    assert not any(LEVELLED.program(slow.current).schedule.evictions)


def believed(*measured):
    """What a message is taken to take after these measurements."""
    tuner, link = Tuner(SCHEDULE, CANDIDATES, TIMES, 3), links(loop(STAGES))[0]
    for samples in measured:
        tuner.observe(CANDIDATES[0], link, samples)
    return tuner.message_ms(CANDIDATES[0])[link]


ANY = st.lists(st.floats(1, 100), min_size=1, max_size=5)
# Each on both sides of the mean of any of them.
STEADY = st.lists(st.floats(80, 120), max_size=3).map(lambda samples: [80.0, *samples, 120.0])


@given(st.lists(ANY, min_size=1, max_size=6))
# Without the oldest measurement the mean is another one.
@example([[1.0] * 5, [1.0, 20.0, 20.0, 20.0, 20.0], [8.0, 20.0, 20.0, 20.0, 20.0], [11.0, 11.0, 11.0, 11.0, 12.0]])
def test_what_is_believed_lies_within_what_was_measured_last(measured):
    assert min(measured[-1]) - 1e-9 <= believed(*measured) <= max(measured[-1]) + 1e-9


@given(st.lists(ANY, max_size=6), ANY, st.sampled_from([0.001, 1000.0]))
def test_a_network_that_has_changed_is_believed_at_once(before, now, factor):
    now = [factor * ms for ms in now]
    assert believed(*before, now) == fmean(now)


@given(st.lists(STEADY, min_size=1, max_size=8))
def test_on_a_network_that_stays_as_it_was_measurements_are_averaged(measured):
    assert believed(*measured) == pytest.approx(fmean(list(chain(*measured))[-15:]))


def test_averages_vary_less_than_measurements():
    noise = random.Random(5)
    runs = [[[noise.gauss(100, 10) for _ in range(5)] for _ in range(3)] for _ in range(1000)]

    def error(found):
        return math.sqrt(fmean((ms - 100) ** 2 for ms in found))

    assert error([believed(*run) for run in runs]) < 0.8 * error([believed(run[-1]) for run in runs])


def test_of_equals_the_smallest_group():
    candidates = [Candidate(k, 1, 12) for k in range(1, 7)]
    tuner = Tuner(SCHEDULE, candidates, {1: TIMES[1]}, None)
    # Free links: all take (m + p - 1)(tf + tb).
    tuner.adopt(0, *tuner.decide(0))
    assert len({round(ms, 6) for ms in tuner.retunes[0].estimates_ms.values()}) == 1
    assert tuner.current == candidates[0]


def test_an_interval_is_counted_in_iterations():
    tuner = tuned(0)
    assert [tuner.due(iteration) for iteration in range(5)] == [False, False, False, True, True]


def test_an_hour_is_counted_in_iterations(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    tuner = Tuner(SCHEDULE, CANDIDATES, TIMES, None)
    tuner.adopt(0, *tuner.decide(0))
    # Nobody knows yet what an iteration takes.
    assert [tuner.due(iteration) for iteration in (1, 9, 10)] == [False, False, True]
    now[0] += 25.0
    tuner.adopt(10, *tuner.decide(10))
    assert [tuner.due(10 + iterations) for iterations in (1, 1439, 1440)] == [False, False, True]


def test_a_state_goes_on_as_the_tuner_would():
    tuner = tuned(60, tuned(0), 3)
    saved = json.loads(json.dumps(tuner.state_dict()))
    other = Tuner(SCHEDULE, (), {}, 3)
    other.load_state_dict(saved, 5)
    assert (other.current, other.candidates) == (tuner.current, tuner.candidates)
    assert [other.due(iteration) for iteration in range(9)] == [tuner.due(iteration) for iteration in range(9)]
    assert other.decide(6) == tuner.decide(6)
    assert other.state_dict() == tuner.state_dict()


def test_uneven_stages_are_carried_out_in_the_order_of_their_times_by_all_ranks_and_when_a_run_goes_on():
    times = {1: StageTimes((20.0, 20.0, 20.0, 30.0), (40.0, 40.0, 40.0, 60.0))}
    candidates = [Candidate(1, 1, 16)]
    rank, other_rank, later = (Tuner(GroupedSchedule(Programs("kfkb"), STAGES), candidates, times, 3) for _ in range(3))
    for one in (rank, other_rank):
        for link in links(loop(STAGES)):
            one.observe(candidates[0], link, [10.0] * 5)
    assumed = rank.schedule.program(candidates[0])
    decided = rank.decide(0)
    for one in (rank, other_rank):
        one.adopt(0, *decided)
    later.load_state_dict(json.loads(json.dumps(rank.state_dict())), 2)
    programs = [one.schedule.program(candidates[0]) for one in (rank, other_rank, later)]
    assert list(programs[0].steps) != list(assumed.steps)
    assert all(list(one.steps) == list(programs[0].steps) for one in programs)
    message_ms = dict.fromkeys(links(loop(STAGES)), 10.0)
    estimated = estimate_ms(programs[0], times[1], message_ms)
    assert estimated == rank.retunes[0].estimates_ms["k1b1"] < 0.95 * estimate_ms(assumed, times[1], message_ms)


def test_a_shorter_interval_counts_from_the_resume():
    tuner = tuned(0, tuned(0), 3)
    saved = tuner.state_dict()
    assert tuner.due(6)
    for interval, first in ((1, 5), (2, 6), (9, 6), (None, 6)):
        other = Tuner(SCHEDULE, (), {}, interval)
        other.load_state_dict(saved, 4)
        assert next(iteration for iteration in range(4, 20) if other.due(iteration)) == first


@given(st.integers(1, 12), st.integers(0, 10))
def test_many_candidates_are_thinned_out(small, halvings):
    # As b halves, k may double.
    found = []
    for halved in range(halvings + 1):
        b = 2 ** (halvings - halved)
        found += [Candidate(k, b, 10**6) for k in range(len(found) + 1, small * 2**halved + 1)]
    kept = thinned_out(found)
    assert set(kept) <= set(found)
    assert [candidate for candidate in found if candidate.k == 1] == [
        candidate for candidate in kept if candidate.k == 1
    ]
    assert {candidate.b for candidate in kept} == {candidate.b for candidate in found}
    if len(found) <= 16:
        assert kept == tuple(found)
    for candidate in found:
        assert any(one.b == candidate.b and one.k <= candidate.k < 1.25 * one.k + 1 for one in kept)
