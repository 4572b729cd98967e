"""Links: sender and receiver meet, the wire carries one message at a time, in order."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evenpipe.schedule import Link, Schedule, ScheduleError, lower, verify
from evenpipe.schedule.order import Order
from evenpipe.simulate import Costs, SimulationError, Wire, simulate
from evenpipe.simulate.simulator import Network
from tests.simulate.pipelines import run


@pytest.mark.parametrize("ends", [(1.0, 4.0), (4.0, 1.0)])
def test_transmission_starts_when_both_ends_are_there(ends: tuple[float, float]) -> None:
    net = Network([Wire(latency_ms=0.5, transmit_ms=2.0)], [0])
    net.waiting[0] = [3]
    net.issue(0, ends[0])
    assert not net.woken
    net.issue(0, ends[1])
    assert (net.start_ms[0], net.end_ms[0]) == (4.0, 6.5)
    assert list(net.woken) == [3]


def test_the_wire_is_busy_for_the_transmission_but_not_for_the_latency() -> None:
    net = Network([Wire(latency_ms=10.0, transmit_ms=2.0)], [0, 0])
    for message in (0, 0, 1, 1):
        net.issue(message, 0.0)
    assert (list(net.start_ms), list(net.end_ms)) == ([0.0, 2.0], [12.0, 14.0])


def test_a_burst_of_forwards_queues_on_a_slow_link() -> None:
    """GPipe on a link three times slower than a forward: arrivals are one transmission apart."""
    simulation = run("gpipe", 2, 4, link=Wire(transmit_ms=3.0))
    starts = [span.start_ms for span in simulation.timeline[1] if span.action.kind == "F"]
    assert starts == [4.0, 7.0, 10.0, 13.0]


def test_opposite_directions_do_not_share_a_wire() -> None:
    there, back = Link("forward", 0, 1), Link("backward", 1, 0)
    slow = Wire(transmit_ms=5.0)
    costs = Costs(forward_ms=(1.0,) * 2, backward_ms=(1.0,) * 2, links={there: slow})
    assert costs.wire(there) == slow
    assert costs.wire(back) == Wire()


def test_one_slow_link_differs_from_its_kind() -> None:
    program = lower(Schedule.parse(["F0 B0"] * 3))
    usual, slow = Wire(transmit_ms=1.0), Wire(transmit_ms=4.0)
    costs = Costs((1.0,) * 3, (1.0,) * 3, wires={"forward": usual}, links={Link("forward", 1, 2): slow})
    assert simulate(program, costs).timeline[2][0].start_ms == 1 + 1 + 1 + 4


def test_bandwidth_is_in_gigabytes_a_second() -> None:
    assert Wire.of(message_bytes=10_000_000, gbps=2.5, latency_ms=0.1) == Wire(latency_ms=0.1, transmit_ms=4.0)


def test_a_program_that_cannot_end_is_not_simulated() -> None:
    """Programs that `verify` returns always can."""
    costs = Costs((1.0,) * 2, (1.0,) * 2)
    with pytest.raises(SimulationError, match="the ends of link forward 0→1 disagree: verify the schedule first"):
        simulate(lower(Schedule.parse(["F0 F1 B0 B1", "F1 F0 B0 B1"])), costs)
    with pytest.raises(ScheduleError, match="wait for one another in a circle"):
        simulate(lower(Schedule.parse(["F0 B0 F1 B1", "F0 F1 B0 B1"])), costs)


def test_a_walk_that_ends_early_is_a_defect_of_evenpipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that was proved posts a receive for each message: without them, the walk has to name who waits."""
    program = verify(Schedule.parse(["F0 F1 B0 B1", "F0 B0 F1 B1"]))
    nothing = np.zeros(0, dtype=np.int64)
    monkeypatch.setattr(Order, "posts", lambda order, stage: (nothing, nothing))
    with pytest.raises(SimulationError) as stuck:
        simulate(program, Costs((1.0,) * 2, (1.0,) * 2))
    assert "stage 0: waits for ever for backward 1→0 0, though" in str(stuck.value)
    assert "this is a defect of evenpipe" in str(stuck.value)
    assert len(str(stuck.value).splitlines()) == 1


@pytest.mark.parametrize("time", [-1.0, math.inf, math.nan])
def test_a_time_that_is_none_is_refused(time: float) -> None:
    with pytest.raises(SimulationError, match="forward_ms"):
        Costs(forward_ms=(time,), backward_ms=(1.0,))
    with pytest.raises(SimulationError, match="wire evict"):
        Costs(forward_ms=(1.0,), backward_ms=(1.0,), wires={"evict": Wire(transmit_ms=time)})


def test_costs_must_fit_the_schedule() -> None:
    with pytest.raises(SimulationError, match="2 stages, the schedule has 1"):
        simulate(lower(Schedule.parse(["F0 B0"])), Costs((1.0,) * 2, (1.0,) * 2))
    with pytest.raises(SimulationError, match="2 forward and 1 backward"):
        Costs(forward_ms=(1.0, 1.0), backward_ms=(1.0,))
    with pytest.raises(SimulationError, match="gbps=0"):
        Wire.of(message_bytes=1, gbps=0)
    with pytest.raises(SimulationError, match="unit_bytes"):
        run("1f1b", 2, 2, unit_bytes=[[1], [1, 1]])
