"""What stages are given follows one order: nothing waits for ever, even if every call waits until it is through.

A defect in what makes the order, or in what gives stages their parts of it, is refused before anything runs.
"""

import sys
from collections import defaultdict
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import (
    COMPUTE,
    Clock,
    Gathering,
    Message,
    Queues,
    ScheduleError,
    Stream,
    lower,
    reordered,
    stream,
    strictest,
    verify,
)
from evenpipe.schedule.order import OF_FORWARD, Order
from tests.schedule.deadlock import blocking_calls, stuck
from tests.schedule.test_lower import shapes
from tests.schedules import build
from tests.schedules import stream as stream_of

kinds = st.sampled_from(get_args(Queues))


def blocked(rows):
    """Of each stage with these steps that waits for ever, if every call waits until it is through: at which call."""
    return stuck([blocking_calls(steps, len(rows)) for steps in rows])


@given(shapes, kinds)
def test_no_stage_waits_for_ever_if_every_call_waits(shape, queues):
    program = lower(build(*shape), queues=queues)
    assert blocked(program.steps) == []


@given(shapes, kinds, st.data())
def test_nor_by_any_clock(shape, queues, data):
    program = lower(build(*shape), queues=queues)
    times = st.lists(st.integers(0, 1 << 22), min_size=len(program.steps), max_size=len(program.steps))
    messages = {link: data.draw(st.integers(0, 1 << 22)) for link in program.links}
    other = reordered(program, Clock(tuple(data.draw(times)), tuple(data.draw(times)), messages))
    assert blocked(other.steps) == []


def test_a_clock_is_the_same_in_any_unit():
    program = lower(build("1f1b", 3, 5))
    assert list(reordered(program, Clock.of((0.7,) * 3, (1.4,) * 3, {})).steps) == list(program.steps)


@given(st.integers(1, 7), st.data())
def test_nor_in_a_stream_with_its_gatherings_and_updates(p, data):
    m, bpipe = data.draw(st.integers(p, 2 * p + 1)), p > 1 and data.draw(st.booleans())
    stream, early = stream_of(p, m, bpipe, queues=data.draw(kinds)), data.draw(st.booleans())
    rows = [
        [
            *(step for batch in range(4) for step in stream.call(stage, batch, update_early=early and stage == 0)),
            *stream.owed(stage, 3),
        ]
        for stage in range(p)
    ]
    assert blocked(rows) == []
    gathered = [[i.batch for s in row for i in (*s.post, *s.then_post) if isinstance(i, Gathering)] for row in rows]
    assert gathered == [[0, 1, 2]] * p


@given(shapes)
def test_with_many_queues_a_receive_is_posted_before_the_first_action_that_ends_later_than_it_is_made(shape):
    program = lower(build(*shape))
    order, table = program.order, program.schedule.table
    for taker in (number for number, posted in enumerate(order.posted.tolist()) if posted >= 0):
        made, posted = order.places[program.wiring.senders[taker]], order.posted[taker]
        assert made < order.places[posted]
        assert posted == table.of(table.stage[posted]).start or order.places[posted - 1] <= made


@given(shapes)
def test_where_hosts_wait_no_compute_waits_for_what_is_made_as_it_ends(shape):
    """A receive that was posted before it would hold it up until then, unless that is its own input."""
    program = lower(build(*shape), queues="synchronised")
    order, table, ends = program.order, program.schedule.table, program.order._walk.ends
    for taker in (number for number, posted in enumerate(order.posted.tolist()) if posted >= 0):
        posted = order.posted[taker]
        if posted != taker and chr(table.kind[posted]) in COMPUTE:
            assert ends[program.wiring.senders[taker]] < ends[posted]


def test_a_stage_is_given_its_ends_at_their_places():
    """1F1B of two stages: F1 ends on stage 0 just before F0 on stage 1, so that both inputs are posted there."""
    posts = [
        [" ".join(str(m.link)[0] + str(m.micro_batch) for m in step.post) for step in row]
        for row in lower(build("1f1b", 2, 3)).steps
    ]
    assert posts == [["", "", "b0", "b1", "", "b2"], ["f0 f1", "", "", "", "f2", ""]]


def test_the_strictest_of_kinds_is_that_which_holds_up_most() -> None:
    """As their definition lists them; where nothing holds anything up there is none."""
    assert strictest([]) == strictest(["many"]) == "many"
    assert strictest(["one", "many"]) == "one"
    assert strictest(["one", "synchronised", "many"]) == "synchronised"


lowering = sys.modules["evenpipe.schedule.lower"]  # whose name the package gives to its function

SHAPES = [
    ("1f1b", 4, 8),
    ("1f1b", 4, 8, 1, True),
    ("kfkb", 4, 8, 1, True, 1, 2),
    ("interleaved", 4, 8, 2),
    ("2bw", 4, 4, 1, True, 2),
    ("v-half", 3, 4),
]


def refused_when_made(schedule):
    """What is said, with the step marked, of the first stage whose steps are refused; None where all are right."""
    program = verify(schedule)
    for stage in range(schedule.stages):
        try:
            program.steps[stage]
        except ScheduleError as refusal:
            said, *grid = str(refusal).splitlines()
            marked = said.startswith(f"schedule {schedule.name}, stage {stage}, step ") and "here" in grid[stage + 1]
            return said if marked else None
    return None


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_right_is_accepted(shape):
    assert refused_when_made(build(*shape)) is None


@pytest.mark.parametrize(
    ("forwards", "said"),
    [(40, "U0 comes before what is gathered of its batch"), (-40, "comes after what is gathered of its batch")],
)
def test_gatherings_late_or_early(monkeypatch, forwards, said):
    schedule, gatherings = build("2bw", 4, 8, 1, True, 3), Order._gatherings
    monkeypatch.setattr(Order, "_gatherings", lambda order: gatherings(order) + forwards * OF_FORWARD)
    with pytest.raises(ScheduleError, match=said):
        verify(schedule)
    with pytest.raises(ScheduleError, match=said):
        reordered(lower(schedule), None)


@pytest.mark.parametrize("wrong", [lambda right: right[::-1], lambda right: right[:-1], lambda right: right[:0]])
def test_gatherings_in_another_order_or_missing(monkeypatch, wrong):
    schedule, gatherings = build("2bw", 3, 3, batches=3), Order._gatherings
    monkeypatch.setattr(Order, "_gatherings", lambda order: wrong(gatherings(order)))
    with pytest.raises(ScheduleError, match="what is gathered of its batch"):
        verify(schedule)


def moved(number, by):
    """Lowering that gives every stage the receive of that ``number`` so many actions later."""
    posts = lowering._posts

    def _posts(program, stage, gatherings):
        post, then_post = posts(program, stage, gatherings)
        received = [(at, item) for at in sorted(post) for item in post[at] if isinstance(item, Message)]
        if number < len(received):
            at, item = received[number]
            post[at] = [other for other in post[at] if other != item]
            post[at + by] = [*post[at + by], item] if by < 0 else [item, *post[at + by]]
        return post, then_post

    return _posts


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_receive_that_lowering_moves_by_one_action(monkeypatch, shape, by):
    schedule, number, said = build(*shape), 2, []
    for number in range(2, 8):
        with monkeypatch.context() as patched:
            patched.setattr(lowering, "_posts", moved(number, by))
            said.append(refused_when_made(schedule))
    assert all(said)


@pytest.mark.parametrize("shape", SHAPES[:4])
def test_which_would_block(monkeypatch, shape):
    monkeypatch.setattr(lowering, "check_steps", lambda *anything: None)
    program = lower(build(*shape))
    waiting = []
    for number in range(8):
        with monkeypatch.context() as patched:
            patched.setattr(lowering, "_posts", moved(number, -1))
            waiting += blocked(list(lower(program.schedule).steps))
    assert waiting


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "wrong",
    [
        lambda event: [],
        lambda event: [event, event],
        lambda event: [event._replace(next_action=event.next_action - 1)],
        lambda event: [event._replace(next_action=event.next_action + 1)],
    ],
    ids=["dropped", "doubled", "early", "late"],
)
def test_an_event_that_the_order_gets_wrong(monkeypatch, shape, wrong):
    schedule, events = build(*shape), Order.events

    def mutated(*given):
        found = events(*given)
        at = next(at for at, event in enumerate(found) if event.message >= 0 and not event.sends and at > 3)
        return [*found[:at], *wrong(found[at]), *found[at + 1 :]]

    monkeypatch.setattr(Order, "events", mutated)
    assert refused_when_made(schedule)


def test_messages_of_one_place_that_one_stage_takes_in_another_order(monkeypatch):
    """Both ends find the same places and yet do not meet."""
    posts = lowering._posts

    def _posts(program, stage, gatherings):
        post, then_post = posts(program, stage, gatherings)
        return defaultdict(list, {at: items[::-1] for at, items in post.items()}), then_post

    monkeypatch.setattr(lowering, "_posts", _posts)
    assert refused_when_made(build("1f1b", 2, 3))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda right: right - 40 * OF_FORWARD, "comes after what is gathered of its batch"),
        (lambda right: right[::-1], "what is gathered of its batch"),
        (lambda right: right + np.arange(len(right)), "micro-batches after the same"),
    ],
)
def test_a_streams_gatherings(monkeypatch, wrong, said):
    gatherings = stream._gatherings
    monkeypatch.setattr(stream, "_gatherings", lambda program: wrong(gatherings(program)))
    with pytest.raises(ScheduleError, match=said):
        stream_of(4, 6, bpipe=True)


@pytest.mark.parametrize("stage", range(4))
def test_a_streams_updates_before_what_they_wait_for_is_gathered(monkeypatch, stage):
    gatherings = stream._gatherings
    monkeypatch.setattr(stream, "_gatherings", lambda program: gatherings(program) + 40 * OF_FORWARD)
    late = stream_of(4, 15)
    with pytest.raises(ScheduleError, match=f"stage {stage} would wait for ever to finish the step of batch 0"):
        late.call(stage, 1)


def test_a_stream_that_repeats_itself_by_another_period(monkeypatch):
    monkeypatch.setattr(Stream, "_period", lambda of, stage: of.stages)
    with pytest.raises(ScheduleError, match=r"stage 0, step .* is not 6 micro-batches after the same"):
        stream_of(6, 6, bpipe=True)


def test_a_streams_steps_are_held_against_its_order(monkeypatch):
    made = stream_of(4, 6, bpipe=True)
    monkeypatch.setattr(lowering, "_posts", moved(2, -1))
    with pytest.raises(ScheduleError, match="has another place in the one order"):
        made.call(1, 0)


def test_a_receive_that_the_order_posts_late(monkeypatch):
    first_after = Order._first_after
    monkeypatch.setattr(Order, "_first_after", lambda *given: first_after(*given) + 1)
    with pytest.raises(ScheduleError, match="has no place in one order"):
        verify(build("1f1b", 3, 4))
