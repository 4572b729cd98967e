"""Transfers on the clock: hidden behind compute, unless they are slow or waited for (BPipe §3, §4).

A link to the host carries one swap after the other each way.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import GAINING, Link, Size, build, find
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


@given(st.sampled_from(["1f1b", "gpipe", "kfkb", "zb-h1"]), st.integers(2, 4), st.integers(1, 4), st.booleans())
def test_a_swap_costs_nothing_on_a_free_link_and_no_less_on_a_slower_one(
    name: str, stages: int, times: int, bpipe: bool
) -> None:
    size, bpipe = Size(stages, stages * times), bpipe and find(name).balanced is not None
    plain, swapped = (build(name, size, bpipe, swaps=swaps) for swaps in ((), GAINING))

    def makespan_ms(swap_ms: float) -> float:
        wire = Wire(transmit_ms=swap_ms)
        costs = Costs((1.0,) * stages, (2.0,) * stages, {"swap out": wire, "swap in": wire}, awaited_swaps=True)
        return simulate(swapped, costs).makespan_ms

    found = [makespan_ms(swap_ms) for swap_ms in (0.0, 0.5, 1.0, 4.0)]
    assert found[0] == simulate(plain, Costs((1.0,) * stages, (2.0,) * stages)).makespan_ms
    assert found == sorted(found)


def test_a_forward_waits_for_a_slow_swap_out() -> None:
    """GPipe's backwards come last: F2 has no room until unit 0 has left, 10 ms after F0."""
    program = build("gpipe", Size(1, 5), swaps=GAINING)
    costs = Costs((1.0,), (2.0,), {"swap out": Wire(transmit_ms=10.0)}, awaited_swaps=True)
    spans = {str(span.action): span for span in simulate(program, costs).timeline[0]}
    assert spans["F1"].start_ms == 1.0
    assert spans["F2"].start_ms == 11.0
