"""Where the literature has a formula, the simulation gives its value."""

from __future__ import annotations

import pytest

from evenpipe.simulate import Wire
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
