"""What stages are given follows one order: nothing waits for ever, even if every call waits until it is through."""

from collections import defaultdict
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.schedule import COMPUTE, UPDATE, Clock, Gathering, Queues, lower, reordered, strictest
from tests.schedule.test_lower import shapes
from tests.schedules import build
from tests.schedules import stream as stream_of

kinds = st.sampled_from(get_args(Queues))


def blocking(rows):
    """Carry out the steps of all stages where every call waits: both ends of a message have to be there at once.

    Of each stage that gets stuck, at what. A gathering wants all stages, an update what was gathered.
    """
    items = [list(_items(steps)) for steps in rows]
    at, met, gathered = [0] * len(items), set(), defaultdict(set)
    moved = True
    while moved:
        moved = False
        for stage, calls in enumerate(items):
            while at[stage] < len(calls):
                kind, what = calls[at[stage]]
                if kind == "wait" and what not in met:
                    break
                if kind == "update" and len(gathered[what]) < len(items):
                    break
                if kind == "gather":
                    gathered[what].add(stage)
                    if len(gathered[what]) < len(items):
                        break
                if kind == "end":
                    other = what.link.target if what.link.source == stage else what.link.source
                    if what in met:
                        at[stage] += 1
                        moved = True
                        continue
                    if at[other] >= len(items[other]) or items[other][at[other]] != (kind, what):
                        break
                    met.add(what)
                at[stage] += 1
                moved = True
    return [(stage, calls[at[stage]]) for stage, calls in enumerate(items) if at[stage] < len(calls)]


def _items(steps):
    for step in steps:
        yield from _posts(step.post)
        yield from (("wait", message) for message in step.complete)
        yield from (("wait", message) for message in step.follows)
        if step.transfer is not None:
            yield "end", step.transfer
        if step.action.kind == UPDATE:
            yield "update", step.action.micro_batch
        yield from _posts(step.then_post)
        if step.send is not None and not step.send.is_local:
            yield "end", step.send


def _posts(items):
    for item in items:
        yield ("gather", item.batch) if isinstance(item, Gathering) else ("end", item)


@given(shapes, kinds)
@settings(deadline=None)
def test_no_stage_waits_for_ever_if_every_call_waits(shape, queues):
    program = lower(build(*shape), queues=queues)
    assert blocking(program.steps) == []


@given(shapes, kinds, st.data())
@settings(deadline=None)
def test_nor_by_any_clock(shape, queues, data):
    program = lower(build(*shape), queues=queues)
    times = st.lists(st.integers(0, 1 << 22), min_size=len(program.steps), max_size=len(program.steps))
    messages = {link: data.draw(st.integers(0, 1 << 22)) for link in program.links}
    other = reordered(program, Clock(tuple(data.draw(times)), tuple(data.draw(times)), messages))
    assert blocking(other.steps) == []


def test_a_clock_is_the_same_in_any_unit():
    program = lower(build("1f1b", 3, 5))
    assert list(reordered(program, Clock.of((0.7,) * 3, (1.4,) * 3, {})).steps) == list(program.steps)


@given(st.integers(1, 7), st.data())
@settings(max_examples=30, deadline=None)
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
    assert blocking(rows) == []
    gathered = [[i.batch for s in row for i in (*s.post, *s.then_post) if isinstance(i, Gathering)] for row in rows]
    assert gathered == [[0, 1, 2]] * p


@given(shapes)
@settings(deadline=None)
def test_with_many_queues_a_receive_is_posted_before_the_first_action_that_ends_later_than_it_is_made(shape):
    program = lower(build(*shape))
    order, table = program.order, program.schedule.table
    for taker in (number for number, posted in enumerate(order.posted.tolist()) if posted >= 0):
        made, posted = order.places[program.wiring.senders[taker]], order.posted[taker]
        assert made < order.places[posted]
        assert posted == table.of(table.stage[posted]).start or order.places[posted - 1] <= made


@given(shapes)
@settings(deadline=None)
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
