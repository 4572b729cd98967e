"""Lowering completes what it starts, and never waits for more than it must."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import DEPARTING, RETURN, lower
from tests.schedules import build

shapes = st.one_of(
    st.tuples(st.sampled_from(["gpipe", "zb-h1", "v-half"]), st.integers(1, 6), st.integers(1, 12)),
    st.tuples(st.just("1f1b"), st.integers(2, 9), st.integers(1, 24), st.just(1), st.booleans()),
    st.tuples(
        st.just("kfkb"), st.integers(2, 6), st.integers(1, 30), st.just(1), st.booleans(), st.just(1), st.integers(1, 6)
    ),
    st.integers(2, 5).flatmap(
        lambda p: st.tuples(
            st.just("interleaved"), st.just(p), st.sampled_from([p, 2 * p, 3 * p]), st.integers(2, 4), st.booleans()
        )
    ),
)


@given(shapes)
def test_k_plus_1_results_are_under_way_on_a_link_and_no_more(shape):
    """So many may be late before a stage waits for them; it keeps alive what it sends."""
    program = lower(build(*shape))
    for steps in program.steps:
        sent, arrived, most = Counter(), Counter(), Counter()
        outgoing = {step.send for step in steps if step.send is not None and not step.send.is_local}
        for step in steps:
            arrived.update(message.link for message in step.complete if message in outgoing)
            if step.send in outgoing:
                sent[step.send.link] += 1
                most[step.send.link] = max(most[step.send.link], sent[step.send.link] - arrived[step.send.link])
        assert most == {link: min(program.schedule.group_size + 1, sent[link]) for link in sent}


@given(shapes)
def test_what_is_started_is_completed_once(shape):
    program = lower(build(*shape))
    for steps, drain in zip(program.steps, program.drain, strict=True):
        started = [
            m
            for step in steps
            for m in (*step.post, *step.then_post, step.transfer, step.send)
            if m is not None and not m.is_local
        ]
        completed = [m for step in steps for m in (*step.complete, *step.follows)] + list(drain)
        assert sorted(started) == sorted(completed)
        assert len(set(started)) == len(started)


@given(shapes)
def test_the_live_count_that_is_carried_out_keeps_the_bound(shape):
    program = lower(build(*shape))
    for stage, steps in enumerate(program.steps):
        live = peak = 0
        departing = {step.transfer for step in steps if step.action.kind in DEPARTING}
        for step in steps:
            live -= sum(message in departing for message in (*step.complete, *step.follows))
            live += step.action.kind in "FLA"
            peak = max(peak, live)
            live -= step.action.kind in "BW"
        assert peak == program.schedule.peak_live[stage] <= program.schedule.bound


@given(shapes)
def test_a_return_waits_for_its_accept_and_a_backward_for_its_load(shape):
    for steps in lower(build(*shape)).steps:
        arrived = set()
        for step in steps:
            arrived |= {(m.link.kind, m.micro_batch, m.chunk) for m in step.complete}
            if step.action.kind == RETURN:
                assert ("evict", *step.action.unit) in arrived
        evicted = {s.action.unit for s in steps if s.action.kind == "E"}
        assert all(("load", *unit) in arrived for unit in evicted)


@given(shapes)
def test_between_two_parts_on_one_stage_a_result_is_handed_over_before_it_is_taken(shape):
    for steps in lower(build(*shape)).steps:
        given = set()
        for step in steps:
            if step.takes is not None:
                assert (step.takes in given) if step.takes.is_local else (step.takes in step.complete)
            if step.send is not None and step.send.is_local:
                given.add(step.send)
