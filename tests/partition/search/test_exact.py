"""The exact search against all partitions there are."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

import numpy as np
import pytest

from evenpipe.partition.costs.matrices import Costs
from evenpipe.partition.dawnpiper.capuchin import Optimize
from evenpipe.partition.dawnpiper.copies import Workload, copies_of
from evenpipe.partition.dawnpiper.problem import Problem
from evenpipe.partition.search.exact import best_partition, search
from evenpipe.partition.search.filling import Partition, nudged, seed
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
@pytest.mark.parametrize(("stages", "layers"), [(2, 4), (3, 3)])
@pytest.mark.parametrize("share", [0.75, 0.5, 0.35])
def test_with_memory_optimisation_too(optimize: Optimize, stages: int, layers: int, share: float) -> None:
    """On graphs of 40 and 53 cuts, against every partition with what its stages recompute and swap."""
    costs = Costs(transformer(layers))
    copies = copies_of(Workload("1f1b", 8), stages)
    loose = search(Problem(costs, copies, 1 << 50))
    assert loose is not None
    limit = int(max(Problem(costs, copies, 1 << 50).peaks(loose.cuts) or ()) * share)
    problem = Problem(costs, copies, limit, optimize, 0.5)
    best, found = min(all_partitions(problem).values(), default=None), search(problem)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.optimum_ms <= best * (1 + 1e-9)
        assert best <= found.ms * (1 + 1e-9) <= 1.001 * best
        assert max(problem.peaks(found.cuts) or ()) <= limit


@pytest.mark.parametrize("seed", range(20))
def test_no_range_takes_less_than_its_lower_bound(seed: int) -> None:
    """On which the proof rests: for every range and how far it is to shrink, by recomputing and by swapping."""
    costs = Costs(random_profile(seed, 12) if seed % 2 else transformer(1))
    copies = copies_of(Workload("pipedream", 2), 2)
    every = np.arange(costs.last + 1)
    whole = int(costs.saved(every, every)[0, -1] + costs.static(every, every, 2)[0, -1]) * 2
    optimize: Optimize = ("recompute", "swap+recompute")[seed // 2 % 2]
    for share in (0.9, 0.6, 0.3):
        problem = Problem(costs, copies, int(whole * share), optimize, 1e-6)
        for position in range(2):
            lower, _ = problem.lower_ms(position, every, every)
            for first in range(costs.last):
                for last in range(first + 1, costs.last + 1):
                    cell = problem.cell(position, first, last)
                    taken = float("inf") if cell is None else cell.ms
                    assert lower[first, last] <= taken * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_stages_that_share_their_memory_with_others(seed: int) -> None:
    """BPipe and model chunks: whatever fits by the schedule's walk is no better than what is found, if all is tried."""
    workload = [Workload("1f1b", 4, bpipe=True), Workload("v-half", 4), Workload("interleaved", 4, chunks=2)][seed % 3]
    costs = Costs(random_profile(seed, 11, cuts=1.0))
    copies = copies_of(workload, 4 if workload.bpipe else 2)
    loose = Problem(costs, copies, 1 << 40)
    whole = best_partition(loose)
    assert whole is not None
    for share in (1.0, 0.93, 0.87):
        problem = loose.within(int(max(loose.peaks(whole.cuts) or ()) * share))
        fitting = all_partitions(problem)
        found = best_partition(problem)
        assert found is None or found.cuts in fitting
        if found is not None:
            best = min(fitting.values())
            assert found.optimum_ms <= best * (1 + 1e-9)
            assert best <= found.ms * (1 + 1e-9) <= 1.001 * best


def test_it_takes_less_than_a_third_of_a_second_for_2400_cuts_and_8_stages() -> None:
    costs = Costs(transformer(185))
    assert costs.last >= 2400
    copies = copies_of(Workload("pipedream", 8), 8)
    loose = search(Problem(costs, copies, 1 << 50))
    assert loose is not None
    peak = max(Problem(costs, copies, 1 << 50).peaks(loose.cuts) or ())
    for share in (1.1, 0.8, 0.6):
        taken = []
        for _ in range(3):  # the fastest counts: what else runs on a core makes each instruction slower
            before = time.process_time()
            assert search(Problem(costs, copies, int(peak * share))) is not None
            taken.append(time.process_time() - before)
        assert min(taken) < 0.3


@pytest.mark.parametrize(("stages", "share"), [(3, 0.8), (3, 0.5), (8, 0.8), (8, 0.3)])
def test_moving_boundaries_never_makes_it_longer_and_ends(stages: int, share: float) -> None:
    """From stages that are filled one after the other, which leaves the last ones little."""
    costs = Costs(transformer(14))
    copies = copies_of(Workload("1f1b", 8), stages)
    loose = search(Problem(costs, copies, 1 << 50))
    assert loose is not None
    limit = int(max(Problem(costs, copies, 1 << 50).peaks(loose.cuts) or ()) * share)
    problem = Problem(costs, copies, limit, "swap+recompute", 0.5)
    found = seed(problem, problem.least_ms)
    assert found is not None
    better = nudged(problem, found)
    cells = [problem.cell(k, *ends) for k, ends in enumerate(pairwise(better.cuts))]
    assert better.ms == max(cell.ms for cell in cells if cell is not None)
    assert better.ms <= found.ms
    assert (better.cuts == found.cuts) == (better.ms == found.ms)
    assert max(problem.peaks(better.cuts) or ()) <= limit
    assert nudged(problem, better) == better


def test_moving_boundaries_shortens_what_is_uneven() -> None:
    costs = Costs(transformer(14))
    problem = Problem(costs, copies_of(Workload("1f1b", 8), 4), 1 << 50)
    cuts = (0, 20, 40, 60, costs.last)
    cells = [problem.cell(k, *ends) for k, ends in enumerate(pairwise(cuts))]
    fits = tuple(cell.fit for cell in cells if cell is not None)
    found = Partition(cuts, max(cell.ms for cell in cells if cell is not None), 0.0, fits)
    assert nudged(problem, found).ms < found.ms
    assert nudged(problem, found, problem.weighed) == found
