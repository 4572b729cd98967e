"""The exact search against all partitions there are."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from evenpipe.partition.costs.matrices import Costs
from evenpipe.partition.dawnpiper.capuchin import Optimize
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.dawnpiper.problem import Problem
from evenpipe.partition.search.exact import best_partition, search
from evenpipe.partition.search.filling import nudged, partition_of, seed
from tests.partition.profiles import PLENTY, problem_of, random_profile, transformer

SCHEDULES = [Workload("gpipe", 4), Workload("1f1b", 8), Workload("2bw", 8), Workload("pipedream", 4)]


def all_partitions(problem: Problem) -> dict[tuple[int, ...], float]:
    """Every partition that fits, by brute force, with its longest stage."""
    last, found = problem.costs.last, {}
    for inner in combinations(range(1, last), problem.copies.positions - 1):
        cuts = (0, *inner, last)
        cells, peaks = problem.cells(cuts), problem.peaks(cuts)
        if cells is not None and peaks is not None and max(peaks) <= problem.limit_bytes:
            found[cuts] = max(cell.ms for cell in cells)
    return found


def tight(loose: Problem, share: float) -> Problem:
    """The problem with a share of the memory that its fastest partition takes as it is."""
    whole = replace(loose, optimize="none").within(PLENTY)
    fastest = search(whole)
    assert fastest is not None
    return loose.within(int(max(whole.peaks(fastest.cuts) or ()) * share))


@pytest.mark.parametrize("numbers", [range(36), pytest.param(range(36, 200), marks=pytest.mark.long)])
def test_it_finds_the_best_of_all_partitions_of_a_random_graph(numbers: range) -> None:
    for number in numbers:
        workload = SCHEDULES[number % len(SCHEDULES)]
        profile = random_profile(number, 9 + number % 4)
        loose = problem_of(profile, workload, min(2 + number % 3, Costs(profile).last))
        for share in (1.0, 0.9, 0.8):
            problem = tight(loose, share)
            best, found = min(all_partitions(problem).values(), default=None), search(problem)
            assert (found is None) == (best is None), number
            if found is not None and best is not None:
                assert found.optimum_ms == pytest.approx(best, rel=1e-9), number
                assert best <= found.ms * (1 + 1e-9) <= 1.001 * best * (1 + 1e-9), number
                assert max(problem.peaks(found.cuts) or ()) <= problem.limit_bytes, number


@pytest.mark.parametrize("optimize", ["recompute", "swap+recompute"])
@pytest.mark.parametrize(("stages", "layers"), [(2, 4), (3, 3)])
@pytest.mark.parametrize("share", [0.75, 0.5, 0.35])
def test_with_memory_optimisation_too(optimize: Optimize, stages: int, layers: int, share: float) -> None:
    """On graphs of 40 and 53 cuts, against every partition with what its stages recompute and swap."""
    problem = tight(problem_of(transformer(layers), Workload("1f1b", 8), stages, PLENTY, optimize, 0.5), share)
    best, found = min(all_partitions(problem).values(), default=None), search(problem)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.optimum_ms <= best * (1 + 1e-9)
        assert best <= found.ms * (1 + 1e-9) <= 1.001 * best
        assert max(problem.peaks(found.cuts) or ()) <= problem.limit_bytes


@pytest.mark.parametrize("seed", range(4))
def test_no_range_takes_less_than_its_lower_bound(seed: int) -> None:
    """On which the proof rests: for every range and how far it is to shrink, by recomputing and by swapping."""
    profile = random_profile(seed, 12) if seed % 2 else transformer(1)
    costs = Costs(profile)
    every = np.arange(costs.last + 1)
    whole = int(costs.saved(every, every)[0, -1] + costs.static(every, every, 2)[0, -1]) * 2
    optimize: Optimize = ("recompute", "swap+recompute")[seed // 2 % 2]
    for share in (0.9, 0.6, 0.3):
        problem = problem_of(profile, "pipedream", 2, int(whole * share), optimize, 1e-6)
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
    loose = problem_of(random_profile(seed, 11, cuts=1.0), workload, 4 if workload.bpipe else 2)
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
    loose = problem_of(transformer(185), "pipedream", 8)
    assert loose.costs.last >= 2400
    for share in (1.1, 0.8, 0.6):
        taken = []
        limit = tight(loose, share).limit_bytes
        for _ in range(3):  # the fastest counts: what else runs on a core makes each instruction slower
            problem = loose.within(limit)
            before = time.process_time()
            assert search(problem) is not None
            taken.append(time.process_time() - before)
        assert min(taken) < 0.3


@pytest.mark.parametrize(("stages", "share"), [(3, 0.8), (3, 0.5), (8, 0.8), (8, 0.3)])
def test_moving_boundaries_never_makes_it_longer_and_ends(stages: int, share: float) -> None:
    """From stages that are filled one after the other, which leaves the last ones little."""
    workload = Workload("1f1b", 8)
    problem = tight(problem_of(transformer(14), workload, stages, PLENTY, "swap+recompute", 0.5), share)
    found = seed(problem, problem.least_ms)
    assert found is not None
    better = nudged(problem, found)
    assert better == partition_of(problem, better.cuts, better.optimum_ms)
    assert better.ms <= found.ms
    assert (better.cuts == found.cuts) == (better.ms == found.ms)
    assert max(problem.peaks(better.cuts) or ()) <= problem.limit_bytes
    assert nudged(problem, better) == better


def test_moving_boundaries_shortens_what_is_uneven() -> None:
    problem = problem_of(transformer(14), Workload("1f1b", 8), 4)
    found = partition_of(problem, (0, 20, 40, 60, problem.costs.last), 0.0)
    assert found is not None
    assert nudged(problem, found).ms < found.ms
    assert nudged(problem, found, problem.weighed) == found
