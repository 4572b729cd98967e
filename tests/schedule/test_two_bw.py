"""2BW is PipeDream-2BW §3.1: a stream without flushes, two weight versions, and each micro-batch on the right one.

A stream's calls are the schedule 2bw of however many batches, and it can be broken off after each of them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import (
    DEPARTING,
    SWAP_IN,
    SWAP_OUT,
    Action,
    Link,
    Message,
    ScheduleError,
    Stream,
    batch_of,
    find,
    lower,
    parse,
    required_version,
    with_swaps,
)
from evenpipe.schedule.spec import alternate, units
from evenpipe.simulate import Costs, Wire, simulate
from tests.schedules import build
from tests.schedules import stream as stream_of


def rule(k: int, m: int) -> int:
    """max(⌊(k − 1)/m⌋ − 1, 0): the version of the k-th micro-batch of a stream, from 1 (PipeDream-2BW §3.1)."""
    return max((k - 1) // m - 1, 0)


def replay(row: Sequence[Action], m: int) -> dict[str, int]:
    """Keep two buffers as a stage does, written by updates only: the version that each compute action finds and uses.

    AssertionError where an update lacks a gradient or its weights, or a micro-batch its version.
    """
    buffers: list[int | None] = [0, None]
    backwarded: set[int] = set()
    used = {}
    for action in row:
        if action.kind == "U":
            batch = action.micro_batch
            assert set(range(batch * m, (batch + 1) * m)) <= backwarded, f"{action} has no gradient yet"
            assert buffers[batch % 2] == batch, f"{action} does not find W({batch})"
            buffers[(batch + 1) % 2] = batch + 1
        elif action.kind in "FB":
            version = rule(action.micro_batch + 1, m)
            assert version in buffers, f"{action} needs W({version}) and finds {buffers}"
            used[str(action)] = version
            if action.kind == "B":
                backwarded.add(action.micro_batch)
    return used


@st.composite
def shapes(draw):
    """Stages, micro-batches (no fewer than stages), batches, and whether with BPipe."""
    p = draw(st.integers(1, 7))
    return p, draw(st.integers(p, 3 * p + 1)), draw(st.integers(1, 5)), p > 1 and draw(st.booleans())


def two_bw(shape):
    p, m, batches, bpipe = shape
    return build("2bw", p, m, bpipe=bpipe, batches=batches)


def test_figure_2_on_the_clock():
    """What the paper says about its figure, in which inputs, workers and time count from 1."""
    simulation = simulate(lower(build("2bw", 4, 4, batches=4)), Costs((1.0,) * 4, (2.0,) * 4))
    times = [{str(span.action): span for span in spans} for spans in simulation.timeline]
    assert times[3 - 1]["F6"].start_ms + 1 == 21  # "input 7 on worker 3 at t = 21"
    for worker in times:
        # "W_4^(4) is first used for input 9's forward pass": by then U0 has made it of the inputs 1 to 4.
        assert worker["U0"].end_ms <= worker["F8"].start_ms
        # "each worker can discard W_i^(0) once they are done processing the backward pass for input 8": U1 does.
        assert worker["B7"].end_ms <= worker["U1"].start_ms
        # No stall from a worker's first backward until the stream runs out of inputs.
        first, last = worker["B0"].start_ms, worker["F15"].end_ms
        steady = [span for span in worker.values() if first <= span.start_ms < last]
        assert all(before.end_ms == after.start_ms for before, after in pairwise(steady))


@given(shapes())
def test_every_micro_batch_has_its_version_forward_and_backward(shape):
    _, m, batches, _ = shape
    for row in two_bw(shape).actions:
        used = replay(row, m)
        assert used == {f"{kind}{k - 1}": rule(k, m) for kind in "FB" for k in range(1, m * batches + 1)}
        assert [action.micro_batch for action in row if action.kind == "U"] == list(range(batches))


@given(st.integers(0, 10**6), st.integers(1, 10**4), st.data())
def test_the_version_of_a_batch_is_that_of_its_micro_batches(batch, m, data):
    k = batch * m + data.draw(st.integers(1, m))
    assert required_version(batch_of(k - 1, m)) == required_version(batch) == rule(k, m)


@given(shapes())
def test_the_compute_is_one_long_1f1b(shape):
    """With its transfers: BPipe levels a stream as it levels a batch."""
    p, m, batches, bpipe = shape
    flushed_once = build("1f1b", p, m * batches, bpipe=bpipe)
    for row, same in zip(two_bw(shape).actions, flushed_once.actions, strict=True):
        assert tuple(action for action in row if action.kind != "U") == same


@given(shapes())
def test_in_flight_and_live_micro_batches_are_bounded(shape):
    p, m, batches, bpipe = shape
    schedule = two_bw(shape)
    for stage, row in enumerate(schedule.actions):
        in_flight = [0]
        for action in row:
            in_flight.append(in_flight[-1] + (action.kind == "F") - (action.kind == "B"))
        assert max(in_flight) == min(p - stage, m * batches)
    assert max(schedule.peak_live) <= schedule.bound
    assert schedule.bound == (min(-(-(p + 2) // 2), p, m * batches) if bpipe else min(p, m * batches))


@given(shapes(), st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=18, max_size=18), st.sampled_from([0.0, 0.5]))
def test_no_stage_waits_for_another_to_update(shape, times, latency):
    """When a stage comes to an update, all stages have ended the batch, however uneven they and their links are."""
    p, m, batches, _ = shape
    wires = dict.fromkeys(("forward", "backward", "evict", "load"), Wire(latency_ms=latency))
    simulation = simulate(lower(two_bw(shape)), Costs(tuple(times[:p]), tuple(times[-p:]), wires))
    ended = {}
    for action, _, end_ms in (span for spans in simulation.timeline for span in spans):
        if action.kind == "B":
            batch = action.micro_batch // m
            ended[batch] = max(ended.get(batch, 0.0), end_ms)
    for action, start_ms, _ in (span for spans in simulation.timeline for span in spans):
        if action.kind == "U" and action.micro_batch < batches - 1:  # the last ends the stream
            assert ended[action.micro_batch] <= start_ms


def test_stage_0_updates_before_the_next_gradient():
    """So it needs no second gradient buffer; the stages after it, which update later, do."""
    for stage, row in enumerate(build("2bw", 5, 7, batches=4).actions):
        assert (row.index(parse("U1")) < row.index(parse("B14"))) == (stage == 0)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ("2bw", 4, 3),
            ["micro_batches=3: 2bw needs at least as many", "stages (4)", "use 4 or more, or schedule 1f1b"],
        ),
        (("2bw", 4, 8, 2), ["chunks=2: 2bw has one model chunk"]),
        (("2bw", 4, 8, 1, False, 0), ["batches=0: must be at least 1"]),
        (("2bw", 1, 8, 1, True), ["bpipe: one stage has no partner"]),
        (("1f1b", 4, 8, 1, False, 2), ["batches=2: 1f1b flushes after every batch", "give 1, or choose schedule 2bw"]),
        (("gpipe", 4, 8, 1, False, 3), ["batches=3: gpipe flushes after every batch"]),
        (("interleaved", 4, 8, 2, True, 2), ["batches=2: interleaved flushes after every batch"]),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, parts):
    with pytest.raises(ScheduleError, match=r"^[^\n]*$") as refusal:
        build(*arguments)
    for part in parts:
        assert part in str(refusal.value)


BATCHES = 4


@st.composite
def streams(draw):
    p = draw(st.integers(1, 6))
    bpipe, swaps = p > 1 and draw(st.booleans()), draw(st.sets(st.integers(0, p - 1)))
    return stream_of(p, draw(st.integers(p, 3 * p + 1)), bpipe, swaps)


def actions(stream, stage, batches, **options):
    return [step.action for batch in range(batches) for step in stream.call(stage, batch, **options)]


@given(st.integers(1, 6), st.data())
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


@pytest.mark.parametrize("name", ["2bw", "paci"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 4), (4, 8), (8, 9)])
def test_without_bpipe_each_stage_may_wait_for_its_device_between_batches(name, p, m):
    """Only the stage after it owes it something: so the last one waits for none, and each other for the next."""
    stream = Stream(find(name), p, m)
    for stage in range(p):
        for step in stream.owed(stage, 3):
            assert {message.link for message in step.post} == {Link("forward", stage - 1, stage)}


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


def test_a_stream_refuses_what_build_refuses():
    with pytest.raises(ScheduleError, match="micro_batches=3: 2bw needs at least as many as there are stages"):
        stream_of(4, 3)
    with pytest.raises(ScheduleError, match="bpipe: one stage has no partner"):
        stream_of(1, 3, bpipe=True)
