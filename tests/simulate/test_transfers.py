"""BPipe's transfers on the clock: hidden behind compute, unless they are slow or waited for (BPipe §3, §4)."""

from __future__ import annotations

import pytest

from evenpipe.simulate import Wire
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
