"""A stream's calls are the schedule 2bw of however many batches, and it can be broken off after each of them."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.schedule import DEPARTING, SWAP_IN, SWAP_OUT, Message, ScheduleError, Stream, find, lower, with_swaps
from evenpipe.schedule.orders import alternate, units
from tests.schedule.weight_versions import replay, rule
from tests.schedules import build
from tests.schedules import stream as stream_of

BATCHES = 4


@st.composite
def streams(draw):
    p = draw(st.integers(1, 9))
    bpipe, swaps = p > 1 and draw(st.booleans()), draw(st.sets(st.integers(0, p - 1)))
    return stream_of(p, draw(st.integers(p, 3 * p + 1)), bpipe, swaps)


def actions(stream, stage, batches, **options):
    return [step.action for batch in range(batches) for step in stream.call(stage, batch, **options)]


@given(st.integers(1, 9), st.data())
@settings(max_examples=40)
def test_the_calls_are_the_beginning_of_the_schedule(p, data):
    m, bpipe = data.draw(st.integers(p, 3 * p + 1)), p > 1 and data.draw(st.booleans())
    swaps = data.draw(st.sets(st.integers(0, p - 1)))
    finite = lower(with_swaps(build("2bw", p, m, bpipe=bpipe, batches=BATCHES + 2), swaps))
    stream = stream_of(p, m, bpipe, swaps)
    for stage in range(p):
        steps = [step for batch in range(BATCHES) for step in stream.call(stage, batch)]
        expected = list(finite.steps[stage][: len(steps)])
        if swaps:  # beside which a gathering may start an action earlier or later, on all stages alike
            gathered = [[item for step in row for item in step.post if gathers(item)] for row in (steps, expected)]
            assert gathered[0][: len(gathered[1])] == gathered[1][: len(gathered[0])]
            steps, expected = ([without_gatherings(step) for step in row] for row in (steps, expected))
        assert steps == expected


def gathers(item):
    return not isinstance(item, Message)


def without_gatherings(step):
    return step._replace(post=tuple(item for item in step.post if not gathers(item)))


@given(streams())
@settings(max_examples=40)
def test_a_call_ends_with_its_batch_and_reaches_into_the_next(stream):
    p, m = stream.stages, stream.micro_batches
    for stage in range(p):
        for batch in range(BATCHES):
            call = [step.action for step in stream.call(stage, batch)]
            ahead = (batch + 1) * m + p - 1 - stage
            assert [a.micro_batch for a in call if a.kind == "B"] == [*range(batch * m, (batch + 1) * m)]
            assert [a.micro_batch for a in call if a.kind == "F"] == [*range(ahead - m if batch else 0, ahead)]
            assert [a.micro_batch for a in call if a.kind == "U"] == ([batch - 1] if batch else [])
            assert call[-1].kind == "B"


@given(streams())
@settings(max_examples=40)
def test_an_early_update_needs_no_second_gradient_buffer(stream):
    """It comes before the batch's first backward, and every micro-batch still finds its weights."""
    m = stream.micro_batches
    for stage in range(stream.stages):
        row = actions(stream, stage, BATCHES, update_early=True)
        used = replay(row, m)
        assert used == {str(a): rule(a.micro_batch + 1, m) for a in row if a.kind in "FB"}
        assert [a for a in row if a.kind != "U"] == [a for a in actions(stream, stage, BATCHES) if a.kind != "U"]
        kinds = {str(a): at for at, a in enumerate(row)}
        assert all(kinds[f"U{batch}"] < kinds[f"B{(batch + 1) * m}"] for batch in range(BATCHES - 1))


@given(streams(), st.integers(0, BATCHES))
@settings(max_examples=40)
def test_broken_off_every_message_has_both_its_ends(stream, batch):
    """Once each stage has taken part in what its partner has started, and each could."""
    ends, owed_needs = Counter(), []
    for stage in range(stream.stages):
        owed = stream.owed(stage, batch)
        done = [step for one in range(batch + 1) for step in stream.call(stage, one)]
        held = set()
        for step in (*done, *owed):
            for message in (*step.post, *step.then_post):
                if isinstance(message, Message):
                    ends[message, "in"] += 1
            if step.send is not None:
                ends[step.send, "out"] += 1
            if step.transfer is not None and step.action.kind not in (SWAP_OUT, SWAP_IN):  # which have both
                ends[step.transfer, "out" if step.action.kind in DEPARTING else "in"] += 1
            if step in owed and step.transfer is None:
                continue  # receives only
            kind, unit = step.action.kind, (step.action.unit, step.action.evictor)
            if kind in "FLA":
                held.add(unit)
            elif kind in "BER":
                held.remove(unit)
        owed_needs += [m for step in owed if step.transfer is not None for m in (*step.complete, *step.follows)]
    assert set(ends.values()) <= {1}
    assert all((message, other) in ends for message, end in ends for other in {"in", "out"} - {end})
    assert all((message, end) in ends for message in owed_needs for end in ("in", "out"))


def test_without_bpipe_nothing_is_owed_but_to_receive_what_neighbours_have_sent():
    stream = stream_of(4, 4)
    owed = [step for stage in range(4) for batch in range(3) for step in stream.owed(stage, batch)]
    assert owed
    assert all(step.post and step.transfer is None for step in owed)


def test_a_call_far_along_is_an_early_one_moved():
    # Partners trade every 4, 3 or 2 micro-batches: together every 12, or 3 batches.
    stream = stream_of(6, 8, bpipe=True)
    batches = 3 * 10**6
    for stage in range(6):
        near, far = stream.call(stage, 4), stream.call(stage, 4 + batches)
        by = {"U": batches}
        moved = [a._replace(micro_batch=a.micro_batch + by.get(a.kind, 8 * batches)) for a in (s.action for s in near)]
        assert [step.action for step in far] == moved


@pytest.mark.parametrize("ahead", [lambda p, s: 0, lambda p, s: p - s, lambda p, s: 2 * (p - s - 1)])
def test_a_stream_in_another_order_than_1f1bs_is_refused(ahead):
    """Calls are cut out of it where 1F1B's order has the ends of batches."""

    def order(size):
        every = units(size.micro_batches)
        return [list(alternate(every, every, ahead(size.stages, stage))) for stage in range(size.stages)]

    other = replace(find("2bw"), name="other", order=order, bound=lambda size: size.micro_batches)
    said = r"schedule=other: stage \d does not run \d forwards ahead of its backwards"
    with pytest.raises(ScheduleError, match=said):
        Stream(other, 4, 4)


def test_bad_input_is_refused_as_by_build():
    with pytest.raises(ScheduleError, match="micro_batches=3: 2bw needs at least as many as there are stages"):
        stream_of(4, 3)
    with pytest.raises(ScheduleError, match="bpipe: one stage has no partner"):
        stream_of(1, 3, bpipe=True)
