"""Transfers on the clock: hidden behind compute, unless they are slow or waited for (BPipe §3, §4).

A link to the host carries one swap after the other each way.
"""

from __future__ import annotations

import pytest

from evenpipe.schedule import Link, Size, build
from evenpipe.simulate import Costs, Wire, simulate
from tests.simulate.pipelines import run


@pytest.mark.parametrize("m", [8, 16, 64])
@pytest.mark.parametrize("transfer", [0.25, 0.5, 1.0])
def test_transfers_not_longer_than_a_forward_cost_nothing(transfer: float, m: int) -> None:
    levelled = run("1f1b", 4, m, bpipe=True, transfer=Wire(transmit_ms=transfer))
    assert levelled.makespan_ms == run("1f1b", 4, m).makespan_ms


def test_synchronous_transfers_cost_each_time() -> None:
    """Figure 4: three evictions and three loads, of which all but one delay what the pipeline waits for."""
    plain = run("1f1b", 4, 8).makespan_ms
    slower = [
        run("1f1b", 4, m, bpipe=True, transfer=Wire(transmit_ms=0.5), synchronous=True).makespan_ms
        - run("1f1b", 4, m).makespan_ms
        for m in (8, 16, 32)
    ]
    assert 0 < slower[0] <= 6 * 0.5
    assert slower[0] < slower[1] < slower[2]
    free = run("1f1b", 4, 8, bpipe=True, synchronous=True)
    assert free.makespan_ms == plain


def test_slow_transfers_cost_even_when_asynchronous() -> None:
    slow = run("1f1b", 4, 32, bpipe=True, transfer=Wire(transmit_ms=3.0))
    assert slow.makespan_ms > run("1f1b", 4, 32).makespan_ms


def test_figure_4_on_the_clock() -> None:
    """Evictor and acceptor see a transfer at the same time, from its start to its arrival."""
    simulation = run("1f1b", 4, 8, bpipe=True, transfer=Wire(latency_ms=0.25, transmit_ms=0.5))
    evictor = [(str(a), start, end) for a, start, end in simulation.timeline[0] if a.kind in "EL"]
    acceptor = [(str(a), start, end) for a, start, end in simulation.timeline[3] if a.kind in "AR"]
    assert evictor == [
        ("E1", 2.0, 2.75),
        ("E3", 4.0, 4.75),
        ("L1", 4.75, 5.5),
        ("E5", 16.0, 16.75),
        ("L3", 16.75, 17.5),
        ("L5", 24.0, 24.75),
    ]
    assert [start_end for _, *start_end in acceptor] == [start_end for _, *start_end in evictor]
    assert [name for name, *_ in acceptor] == ["A1@0", "A3@0", "R1@0", "A5@0", "R3@0", "R5@0"]


def makespan(swap_ms: float, beside_ms: float = 0.0, stages: int = 2, micro_batches: int = 8) -> float:
    wires = dict.fromkeys(("swap out", "swap in"), Wire(0.0, swap_ms, beside_ms))
    program = build("1f1b", Size(stages, micro_batches), swaps=(0,))
    return simulate(program, Costs((1.0,) * stages, (2.0,) * stages, wires)).makespan_ms


def test_what_passes_beside_a_forward_costs_nothing() -> None:
    assert makespan(0.0) == makespan(1.0) == 27.0


def test_what_takes_longer_than_the_forward_is_waited_for() -> None:
    assert makespan(1.5) > 27.0


def test_what_comes_back_beside_its_own_backward_is_not() -> None:
    """The head of it is waited for, and the link is busy with the rest."""
    assert makespan(2.5, beside_ms=2.0) == 27.0
    assert makespan(3.5, beside_ms=3.5) > 27.0, "more than a forward and a backward take, every micro-batch"


def test_only_the_link_that_is_slow_holds_its_stage_up() -> None:
    program = build("1f1b", Size(1, 3), swaps=(0,))
    costs = Costs((1.0,), (2.0,), links={Link("swap in", 0, 0): Wire(0.0, 5.0)})
    assert simulate(program, costs).makespan_ms == pytest.approx(3 * (1 + 5 + 2))
