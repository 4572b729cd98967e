"""How good searched orders are: at batches of any length, with errors, and in how long. Cases: `building_blocks.py`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

from evenpipe.order_search.clock import makespan
from evenpipe.order_search.compiled import COMPILED
from evenpipe.order_search.problem import Order, Problem
from evenpipe.order_search.search import EXPECTED, Effort, Errors, search
from evenpipe.schedule import Size, find

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from building_blocks import EXACT, case

pytestmark = [pytest.mark.long, pytest.mark.skipif(not COMPILED, reason="finds less without numba")]


def order(problem: Problem, seconds: float, errors: Errors = EXACT) -> Order:
    return problem.order(search(problem, Effort(seconds), errors).best[0].actions)


def share(problem: Problem, seconds: float = 10.0) -> float:
    return problem.limit_ms / makespan(problem, order(problem, seconds))


@pytest.mark.parametrize(("memory", "least"), [(0.625, 0.87), (1.0, 0.97)])
def test_short_messages_leave_little_to_wait_for(memory: float, least: float) -> None:
    assert np.mean([share(case("uneven", 8, seed, 16, memory)) for seed in range(8)]) >= least


@pytest.mark.parametrize(
    ("stages", "micro_batches", "memory", "least"),
    # What a whole search of as many micro-batches found, less 0.5 %.
    [(8, 64, 0.625, 0.9795), (4, 48, 0.75, 0.9895)],
)
def test_long_batches_lose_nothing(stages: int, micro_batches: int, memory: float, least: float) -> None:
    assert share(case("uneven", stages, 0, micro_batches, memory)) >= least


@pytest.mark.parametrize(("memory", "least"), [(0.625, 0.88), (1.0, 0.96)])
def test_sixteen_stages_take_less_than_a_minute(memory: float, least: float) -> None:
    began = time.process_time()
    assert share(case("uneven", 16, 0, 64, memory), 30.0) >= least
    assert time.process_time() - began <= 60


@pytest.mark.parametrize(("memory", "name", "cases", "gain"), [(1.0, "zbv", 8, 1.02), (0.625, "v-half", 4, 1.04)])
def test_errors_of_times_leave_the_gain(memory: float, name: str, cases: int, gain: float) -> None:
    """Over these cases × 48 samples that the search has not seen; also where stages are 10 % off."""
    gains: list[list[float]] = []
    rougher: list[list[float]] = []
    for seed in range(cases):
        problem = case("uneven", 8, seed, 16, memory)
        found, named = order(problem, 10.0, EXPECTED), problem.order(find(name).order(Size(8, 16, 2)))
        for errors, into in ((EXPECTED, gains), (EXPECTED._replace(stage=0.1), rougher)):
            unseen = list(zip(*errors.samples(problem, 49, 12345), strict=True))[1:]
            into.append([makespan(problem, named, *one) / makespan(problem, found, *one) for one in unseen])
    assert np.mean(gains) >= gain
    assert np.mean(gains, axis=1).min() >= 1.0
    assert np.quantile(gains, 0.05) >= 0.985
    assert np.min(gains) >= 0.97
    assert np.mean(rougher) >= 1.0
