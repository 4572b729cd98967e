"""Where the literature has a formula or a figure, the simulation gives it: flushed pipelines, kFkB, and 2BW.

kFkB: Figure 2 and §4.4 of Ada-Grouper, by hand and over many pipelines. 2BW: no bubble but at the two ends of the
stream (PipeDream-2BW §3.1).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import Link, lower
from evenpipe.simulate import Costs, Simulation, Wire, simulate
from tests.schedules import build
from tests.simulate.pipelines import run

SIZES = [(1, 1), (1, 5), (2, 1), (2, 2), (3, 7), (4, 2), (4, 8), (5, 5), (8, 3), (8, 16), (16, 32)]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_flushed_pipeline_takes_m_plus_p_minus_1_slots(name: str, p: int, m: int) -> None:
    simulation = run(name, p, m, forward=3.0, backward=5.0)
    assert simulation.makespan_ms == (m + p - 1) * (3.0 + 5.0)
    assert simulation.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    for stage in simulation.stages:
        assert stage.busy_ms == m * (3.0 + 5.0)
        assert stage.idle_ms == (p - 1) * (3.0 + 5.0)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (4, 8, 2), (4, 8, 4), (8, 16, 2), (8, 16, 4)])
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, m: int, v: int) -> None:
    """The same stage cut into v chunks computes as long and idles 1/v of the time (interleaved 1F1B, §2.2)."""
    whole, cut = run("1f1b", p, m), run("interleaved", p, m, chunks=v)
    assert cut.stages[0].busy_ms == pytest.approx(whole.stages[0].busy_ms)
    assert cut.stages[0].idle_ms == pytest.approx(whole.stages[0].idle_ms / v)
    assert cut.bubble_fraction == pytest.approx((p - 1) / (m * v + p - 1))


def test_one_slow_stage_sets_the_pace() -> None:
    """The way to the slow stage, m turns of it without a pause, and the way back."""
    forward, backward = (1.0, 1.0, 4.0, 1.0), (2.0, 2.0, 8.0, 2.0)
    simulation = run("1f1b", 4, 16, forward=forward, backward=backward)
    assert simulation.stages[2].busy_ms == 16 * 12.0
    assert simulation.makespan_ms == (1 + 1) + 16 * 12.0 + (2 + 2)


def test_the_first_forward_pays_every_link_once() -> None:
    simulation = run("gpipe", 4, 1, link=Wire(latency_ms=0.25, transmit_ms=0.5))
    assert simulation.makespan_ms == 4 * (1.0 + 2.0) + 2 * 3 * 0.75


#: Figure 2: a backward takes two forwards, a transfer half a forward.
HALF = Wire(transmit_ms=0.5)

# By hand, three stages and six micro-batches: an action starts when the one before it has ended and, where that is
# later, half a millisecond after its input was ready. The last stage of 2F2B never waits; that of 1F1B waits for F2.
FIGURE_2 = {
    1: """
F0:0.0 F1:1.0 F2:2.0 B0:9.0 F3:11.0 B1:12.0 F4:14.0 B2:16.0 F5:18.0 B3:20.0 B4:23.0 B5:27.0
F0:1.5 F1:2.5 B0:6.5 F2:8.5 B1:9.5 F3:12.5 B2:13.5 F4:15.5 B3:17.5 F5:19.5 B4:20.5 B5:24.5
F0:3.0 B0:4.0 F1:6.0 B1:7.0 F2:10.0 B2:11.0 F3:14.0 B3:15.0 F4:17.0 B4:18.0 F5:21.0 B5:22.0
""",
    2: """
F0:0.0 F1:1.0 F2:2.0 F3:3.0 F4:4.0 F5:5.0 B0:10.0 B1:12.0 B2:16.0 B3:18.0 B4:22.0 B5:24.0
F0:1.5 F1:2.5 F2:3.5 F3:4.5 B0:7.5 B1:9.5 F4:11.5 F5:12.5 B2:13.5 B3:15.5 B4:19.5 B5:21.5
F0:3.0 F1:4.0 B0:5.0 B1:7.0 F2:9.0 F3:10.0 B2:11.0 B3:13.0 F4:15.0 F5:16.0 B4:17.0 B5:19.0
""",
}


class Unsteady(Wire):
    """A wire on which the messages `late`, counted from 0, take longer by `by_ms`."""

    def __new__(cls, usual_ms: float, late: set[int], by_ms: float) -> Unsteady:
        wire = super().__new__(cls, 0.0, usual_ms)
        wire.messages = iter(usual_ms + by_ms * (number in late) for number in range(1000))
        return wire

    @property
    def transmit_ms(self) -> float:
        """Of the next message."""
        return next(self.messages)


def makespan_with_late(p: int, m: int, k: int, late: dict[Link, set[int]]) -> float:
    """Transfers of half a forward; those that are late, a forward more."""
    links = {link: Unsteady(0.5, numbers, 1.0) for link, numbers in late.items()}
    costs = Costs((1.0,) * p, (2.0,) * p, {"forward": HALF, "backward": HALF}, links)
    return simulate(lower(build("kfkb", p, m, group_size=k)), costs).makespan_ms


def starts(simulation: Simulation) -> str:
    return "\n".join(" ".join(f"{span.action}:{span.start_ms}" for span in row) for row in simulation.timeline)


@pytest.mark.parametrize(("k", "makespan_ms"), [(1, 29.0), (2, 26.0)])
def test_the_two_timelines_of_figure_2(k: int, makespan_ms: float) -> None:
    simulation = run("kfkb", 3, 6, group_size=k, link=HALF)
    assert starts(simulation) == FIGURE_2[k].strip()
    assert simulation.makespan_ms == makespan_ms


@given(st.integers(2, 7), st.integers(1, 24), st.integers(2, 6), st.sampled_from([0.0, 1.0, 1.5]))
def test_transfers_of_up_to_half_a_forward_cost_the_way_there_and_back_only(
    p: int, m: int, k: int, transfer_ms: float
) -> None:
    """k ≥ 2: (m + p − 1)(tf + tb) + 2(p − 1)·transfer, and every stage back to back from its first wait on.

    1F1B takes at least as long, and longer as soon as there is a steady state to be stalled in.
    """
    link = Wire(transmit_ms=transfer_ms)
    simulation = run("kfkb", p, m, group_size=k, forward=3.0, backward=5.0, link=link)
    assert simulation.makespan_ms == (m + p - 1) * (3.0 + 5.0) + 2 * (p - 1) * transfer_ms
    last = simulation.timeline[-1]
    assert last[-1].end_ms - last[0].start_ms == m * (3.0 + 5.0)
    stalled = run("1f1b", p, m, forward=3.0, backward=5.0, link=link).makespan_ms - simulation.makespan_ms
    assert stalled > 0 if m > p and transfer_ms else stalled >= 0


@given(st.integers(1, 6), st.integers(1, 24), st.integers(1, 6))
def test_without_transfers_groups_change_nothing(p: int, m: int, k: int) -> None:
    simulation = run("kfkb", p, m, group_size=k, forward=3.0, backward=5.0)
    assert simulation.makespan_ms == (m + p - 1) * (3.0 + 5.0)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@given(st.integers(2, 5), st.integers(2, 5), st.integers(2, 24), st.data())
def test_late_messages_of_a_link_are_absorbed_by_its_queue(
    direction: str, p: int, k: int, m: int, data: st.DataObject
) -> None:
    """§4.4: what is late by up to a forward finds the stage with other inputs to go on with.

    Only what fills or drains the pipeline has nothing before it in the queue: the first group's forwards and the last
    group's backwards.
    """
    stage, late = data.draw(st.integers(0, p - 2)), data.draw(st.sets(st.integers(0, m - 1)))
    if direction == "forward":
        links = {Link("forward", stage, stage + 1): late - set(range(k))}
    else:
        links = {Link("backward", stage + 1, stage): late - set(range((m - 1) // k * k, m))}
    assert makespan_with_late(p, m, k, links) == makespan_with_late(p, m, k, {})


@pytest.mark.parametrize("p", [2, 3])
def test_1f1b_pays_for_every_late_message(p: int) -> None:
    link = Link("backward", 1, 0)
    slower = [makespan_with_late(p, 24, 1, {link: set(range(0, n, 6))}) for n in (0, 6, 12, 18)]
    assert slower == [slower[0] + n for n in range(4)]


FORWARD, BACKWARD = 3.0, 5.0
STREAMS = [(1, 1), (1, 3), (2, 2), (2, 5), (4, 4), (4, 5), (4, 8), (8, 8), (8, 16)]


def starts_on(simulation: Simulation, stage: int) -> dict[tuple[str, int], float]:
    return {(a.kind, a.micro_batch): start for a, start, _ in simulation.timeline[stage] if a.kind in "FB"}


@pytest.mark.parametrize("batches", [1, 2, 5])
@pytest.mark.parametrize(("p", "m"), STREAMS)
def test_a_stream_fills_and_drains_the_pipeline_once(p: int, m: int, batches: int) -> None:
    simulation = run("2bw", p, m, batches=batches, forward=FORWARD, backward=BACKWARD)
    assert simulation.makespan_ms == (batches * m + p - 1) * (FORWARD + BACKWARD)
    assert simulation.bubble_fraction == pytest.approx((p - 1) / (batches * m + p - 1))
    assert all(stage.busy_ms == batches * m * (FORWARD + BACKWARD) for stage in simulation.stages)


@pytest.mark.parametrize(("bpipe", "forward", "backward"), [(False, 3.0, 5.0), (True, 2.0, 4.0)])
@pytest.mark.parametrize(("p", "m"), [size for size in STREAMS if size[0] > 1])
def test_a_batch_takes_the_time_of_its_compute(p: int, m: int, bpipe: bool, forward: float, backward: float) -> None:
    """On every stage, from a micro-batch to that of the next batch: m(tf + tb), transfers of up to tf included."""
    transfer = Wire(transmit_ms=forward)
    simulation = run("2bw", p, m, batches=6, bpipe=bpipe, forward=forward, backward=backward, transfer=transfer)
    for stage in range(p):
        at = starts_on(simulation, stage)
        for micro_batch in range(2 * m, 4 * m):  # neither fills nor drains the pipeline
            for kind in "FB":
                assert at[kind, micro_batch + m] - at[kind, micro_batch] == m * (forward + backward)


@pytest.mark.parametrize(("p", "m", "speed_up"), [(4, 4, 1.75), (4, 8, 1.375), (8, 8, 1.875)])
def test_the_speed_up_over_a_flush_each_batch(p: int, m: int, speed_up: float) -> None:
    """(m + p − 1)/m in the steady state."""
    flushed = run("1f1b", p, m).makespan_ms
    longer, shorter = (run("2bw", p, m, batches=batches).makespan_ms for batches in (7, 4))
    assert flushed / ((longer - shorter) / 3) == speed_up == (m + p - 1) / m


def test_the_slowest_stage_sets_the_pace() -> None:
    times = (1.0, 1.0, 4.0, 1.0), (2.0, 2.0, 8.0, 2.0)
    at = starts_on(run("2bw", 4, 6, batches=5, forward=times[0], backward=times[1]), 2)
    assert at["F", 18] - at["F", 12] == 6 * (4.0 + 8.0)


def test_bpipe_costs_a_stream_no_time_and_holds_its_bound() -> None:
    transfer = Wire(transmit_ms=1.0)
    plain = run("2bw", 8, 8, batches=4)
    level = run("2bw", 8, 8, batches=4, bpipe=True, transfer=transfer)
    assert level.makespan_ms == plain.makespan_ms
    assert [stage.peak_live for stage in plain.stages] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert max(stage.peak_live for stage in level.stages) == 5  # ⌈(8 + 2)/2⌉


def test_updates_take_no_time_and_hold_nothing() -> None:
    for spans in run("2bw", 3, 4, batches=3).timeline:
        updates = [span for span in spans if span.action.kind == "U"]
        assert [span.action.micro_batch for span in updates] == [0, 1, 2]
        assert all(span.start_ms == span.end_ms for span in updates)
