"""2BW is PipeDream-2BW §3.1: a stream without flushes, two weight versions, and each micro-batch on the right one."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.schedule import ScheduleError, lower, parse, required_version
from evenpipe.simulate import Costs, Wire, simulate
from tests.schedule.weight_versions import replay, rule
from tests.schedules import build


@st.composite
def shapes(draw):
    """Stages, micro-batches (no fewer than stages), batches, and whether with BPipe."""
    p = draw(st.integers(1, 9))
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
@settings(max_examples=40)
def test_every_micro_batch_has_its_version_forward_and_backward(shape):
    _, m, batches, _ = shape
    for row in two_bw(shape).actions:
        used = replay(row, m)
        assert used == {f"{kind}{k - 1}": rule(k, m) for kind in "FB" for k in range(1, m * batches + 1)}
        assert [action.micro_batch for action in row if action.kind == "U"] == list(range(batches))


@given(st.integers(0, 10**6), st.integers(1, 10**4), st.data())
def test_the_version_of_a_batch_is_that_of_its_micro_batches(batch, m, data):
    assert required_version(batch) == rule(batch * m + data.draw(st.integers(1, m)), m)


@given(shapes())
@settings(max_examples=40)
def test_the_compute_is_one_long_1f1b(shape):
    """With its transfers: BPipe levels a stream as it levels a batch."""
    p, m, batches, bpipe = shape
    flushed_once = build("1f1b", p, m * batches, bpipe=bpipe)
    for row, same in zip(two_bw(shape).actions, flushed_once.actions, strict=True):
        assert tuple(action for action in row if action.kind != "U") == same


@given(shapes())
@settings(max_examples=40)
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
@settings(max_examples=40)
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
