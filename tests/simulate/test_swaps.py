"""Swaps on the clock: a link to the host carries one after the other each way, and compute waits where it must."""

from __future__ import annotations

import pytest

from evenpipe.schedule import Link, Size, build
from evenpipe.simulate import Costs, Wire, simulate


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
