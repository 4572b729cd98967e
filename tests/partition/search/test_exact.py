"""The exact search against all partitions there are."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

import pytest

from evenpipe.partition.search.copies import Workload, copies_of
from evenpipe.partition.search.costs import Costs
from evenpipe.partition.search.exact import search
from evenpipe.partition.search.problem import Problem
from tests.partition.profiles import random_profile, transformer

SCHEDULES = [Workload("gpipe", 4), Workload("1f1b", 8), Workload("2bw", 8), Workload("pipedream", 4)]


def all_partitions(problem: Problem) -> dict[tuple[int, ...], float]:
    """Every partition that fits, by brute force, with its longest stage."""
    last, count = problem.costs.last, problem.copies.positions
    found = {}
    for inner in combinations(range(1, last), count - 1):
        cuts = (0, *inner, last)
        cells = [problem.cell(k, *ends) for k, ends in enumerate(pairwise(cuts))]
        peaks = problem.peaks(cuts)
        if peaks is not None and max(peaks) <= problem.limit_bytes:
            found[cuts] = max(cell.ms for cell in cells if cell is not None)
    return found


@pytest.mark.parametrize("seed", range(200))
def test_it_finds_the_best_of_all_partitions_of_a_random_graph(seed: int) -> None:
    workload = SCHEDULES[seed % len(SCHEDULES)]
    costs = Costs(random_profile(seed, 9 + seed % 4))
    stages = min(2 + seed % 3, costs.last)
    copies = copies_of(workload, stages)
    loose = Problem(costs, copies, 1 << 40)
    whole = search(loose)
    assert whole is not None
    peak = max(loose.peaks(whole.cuts) or ())
    for share in (1.0, 0.9, 0.8):
        problem = loose.within(int(peak * share))
        best, found = min(all_partitions(problem).values(), default=None), search(problem)
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            assert found.optimum_ms == pytest.approx(best, rel=1e-9)
            assert best <= found.ms * (1 + 1e-9) <= 1.001 * best * (1 + 1e-9)
            assert max(problem.peaks(found.cuts) or ()) <= problem.limit_bytes


@pytest.mark.parametrize("optimize", ["recompute", "swap+recompute"])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("share", [0.75, 0.5, 0.35])
def test_with_memory_optimisation_too(optimize: str, stages: int, share: float) -> None:
    costs = Costs(transformer(3))
    copies = copies_of(Workload("1f1b", 8), stages)
    loose = search(Problem(costs, copies, 1 << 50))
    assert loose is not None
    limit = int(max(Problem(costs, copies, 1 << 50).peaks(loose.cuts) or ()) * share)
    problem = Problem(costs, copies, limit, optimize, 0.5)  # type: ignore[arg-type]
    best, found = min(all_partitions(problem).values(), default=None), search(problem)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.optimum_ms == pytest.approx(best, rel=1e-9)
        assert found.ms <= 1.001 * best


def test_it_takes_less_than_a_third_of_a_second_for_2400_cuts_and_8_stages() -> None:
    costs = Costs(transformer(185))
    assert costs.last >= 2400
    copies = copies_of(Workload("pipedream", 8), 8)
    loose = search(Problem(costs, copies, 1 << 50))
    assert loose is not None
    peak = max(Problem(costs, copies, 1 << 50).peaks(loose.cuts) or ())
    for share in (1.1, 0.8, 0.6):
        before = time.process_time()
        found = search(Problem(costs, copies, int(peak * share)))
        assert time.process_time() - before < 0.3
        assert found is not None
