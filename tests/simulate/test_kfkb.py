"""kFkB on the clock: what Figure 2 and §4.4 of Ada-Grouper say of it, by hand and over many pipelines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.schedule import Link, lower
from evenpipe.simulate import Costs, Simulation, Wire, simulate
from tests.schedules import build
from tests.simulate.pipelines import run

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
@settings(deadline=None, max_examples=60)
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
