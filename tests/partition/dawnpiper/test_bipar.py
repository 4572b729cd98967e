"""Algorithm 1, and the theorem that it rests on."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from evenpipe.partition.costs.matrices import Costs
from evenpipe.partition.dawnpiper.balance import Balance
from evenpipe.partition.dawnpiper.bipar import bipar
from evenpipe.partition.dawnpiper.capuchin import Optimize
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.dawnpiper.problem import Problem
from evenpipe.partition.profile import Profile, Storage
from evenpipe.partition.search.exact import search
from tests.partition.profiles import assembled, problem_of, random_profile, transformer


def chain(count: int, *, forward_ms: list[float] | None = None, nbytes: list[int] | None = None) -> Profile:
    """Nodes in a row that each read the one before, and save what they make, for which a byte takes the same."""
    nbytes = nbytes or [12] * count
    times = [(ms, 2 * ms) for ms in (forward_ms or [1.0] * count)]
    kept = [Storage(nbytes=nbytes[n], producer=n, users=(n + 1,) * (n + 1 < count), savers=(n,)) for n in range(count)]
    return assembled(times, kept, [])


def two_stages(profile: Profile, limit: int, optimize: Optimize) -> tuple[Problem, dict[int, float]]:
    """Every cut in two that fits under PipeDream's schedule, with the longer stage's time."""
    problem = problem_of(profile, "pipedream", 2, limit, optimize)
    last = problem.costs.last
    pairs = {cut: (problem.cell(0, 0, cut), problem.cell(1, cut, last)) for cut in range(1, last)}
    return problem, {cut: max(a.ms, b.ms) for cut, (a, b) in pairs.items() if a is not None and b is not None}


def points(problem: Problem) -> tuple[int, int]:
    """The memory-balanced and the compute-balanced cut in two."""
    balance, last = Balance(problem), problem.costs.last
    return balance.memory_cut(0, last, range(1), range(1, 2)), balance.compute_cut(0, last, 1, 1)


@pytest.mark.parametrize("optimize", ["none", "recompute"])
@pytest.mark.parametrize("count", [7, 10, 16, 23])
@pytest.mark.parametrize("draw", range(2))
def test_theorem_4_1_by_exhaustion(optimize: Optimize, count: int, draw: int) -> None:
    """Time and memory grow with every node, nothing is sent that counts, and every byte is as dear to compute again.

    Then, whatever the limit, a best cut lies between the two points; nodes are whole, so each may be one of them off.
    """
    growing = [1.0 + 0.02 * ((n * (draw + 3)) % 5) for n in range(count)]
    profile = chain(count, forward_ms=growing, nbytes=[round(1000 * ms) for ms in growing])
    problem, _ = two_stages(profile, 1 << 60, optimize)
    memory_cut, compute_cut = points(problem)
    assert memory_cut <= compute_cut
    most = max(problem.peaks((0, compute_cut, problem.costs.last)) or ())
    for share in (1.0, 0.9, 0.8, 0.7):
        _, fits = two_stages(profile, int(most * share), optimize)
        if not fits:
            continue
        between = [ms for cut, ms in fits.items() if memory_cut - 1 <= cut <= compute_cut + 1]
        assert min(between, default=float("inf")) == pytest.approx(min(fits.values()))


def test_without_its_third_condition_the_best_cut_lies_outside() -> None:
    """Memory optimisation opportunities are not even: the last nodes save much that is dear to compute again.

    To make the second stage fit the last nodes would have to run again; a cut further to the right than both points
    moves the quick ones, whose bytes are cheap, to the first stage, which has room for them once it recomputes.
    """
    count = 12
    forward_ms = [1.0] * 6 + [0.1] * 3 + [3.0] * 3
    nbytes = [100] * 6 + [400] * 3 + [900] * 3
    profile = chain(count, forward_ms=forward_ms, nbytes=nbytes)
    outside = []
    for limit in range(1500, 6000, 100):
        problem, fits = two_stages(profile, limit, "recompute")
        if not fits:
            continue
        low, high = sorted(points(problem))
        inside = min((ms for cut, ms in fits.items() if low <= cut <= high), default=float("inf"))
        outside += [limit] * (min(fits.values()) < 0.99 * inside)
    assert outside


def test_where_the_compute_balanced_point_fits_it_is_taken_at_once() -> None:
    """Algorithm 1, line 3: nothing else is tried."""
    problem = problem_of(transformer(6), "pipedream", 2)
    found = bipar(problem)
    assert found.part is not None
    assert found.nodes_tried == 1
    assert found.part.cuts[1] == points(problem)[1]


def test_candidates_are_tried_from_the_memory_balanced_point_until_one_does_not_fit() -> None:
    """Without memory optimisation what is found is the last that fits on the way to the compute-balanced point."""
    loose = problem_of(transformer(6), "pipedream", 2)
    memory_cut, compute_cut = points(loose)
    most = max(loose.peaks((0, compute_cut, loose.costs.last)) or ())
    problem = loose.within(int(most * 0.9))
    found = bipar(problem)
    assert found.part is not None
    assert memory_cut <= found.part.cuts[1] < compute_cut
    assert 1 < found.nodes_tried <= compute_cut - memory_cut + 1


def test_behind_the_first_that_does_not_fit_nothing_is_tried() -> None:
    """Lines 10 and 11: a large message over one cut does not fit, and what lies behind is left to the exact search."""
    count, crossed = 16, 5
    storages = [
        *[Storage(nbytes=100, producer=n, users=(n + 1,) * (n < count - 1), savers=(n,)) for n in range(count)],
        Storage(nbytes=5000, producer=crossed, users=(crossed + 1,), savers=()),
    ]
    profile = assembled([(1.0, 2.0)] * count, storages, [])
    problem, fits = two_stages(profile, 1600, "none")
    memory_cut, compute_cut = points(problem)
    assert memory_cut < crossed + 1 < compute_cut
    assert crossed + 1 not in fits
    assert min(fits, key=lambda cut: fits[cut]) > crossed + 1
    found = bipar(problem).part
    assert found is not None
    assert found.cuts[1] == crossed
    best = search(problem)
    assert best is not None
    assert best.ms < found.ms


@pytest.mark.parametrize("stages", [2, 3, 6, 8])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "pipedream"])
def test_any_number_of_stages(stages: int, name: str) -> None:
    """Three are cut off from a part by the first one's points, so that a depth need be no power of 2."""
    problem = problem_of(transformer(16), Workload(name, stages), stages)
    found, best = bipar(problem), search(problem)
    assert found.part is not None
    assert best is not None
    assert found.whole
    assert 1 <= found.widest <= problem.costs.last
    assert bipar(problem, most_parts=1).whole == (stages == 2)
    assert len(found.part.cuts) == stages + 1
    assert all(before < behind for before, behind in pairwise(found.part.cuts))
    assert best.optimum_ms <= found.part.ms * (1 + 1e-9)
    assert found.part.ms <= 1.1 * best.optimum_ms


@pytest.mark.parametrize("seed", range(0, 60, 5))
def test_it_is_never_better_than_the_best_of_all_partitions(seed: int) -> None:
    costs = Costs(random_profile(seed, 10))
    stages = min(2 + seed % 3, costs.last)
    problem = problem_of(costs.profile, "pipedream", stages)
    best = min(
        max(float(costs.upto_ms[b] - costs.upto_ms[a]) for a, b in pairwise((0, *inner, costs.last)))
        for inner in combinations(range(1, costs.last), stages - 1)
    )
    found = bipar(problem).part
    assert found is not None
    assert found.ms >= best * (1 - 1e-9)


def test_known_bounds_spare_work_and_change_nothing() -> None:
    loose = problem_of(transformer(12), "pipedream", 4)
    best = search(loose)
    assert best is not None
    limit = int(max(loose.peaks(best.cuts) or ()) * 0.7)
    alone = bipar(loose.within(limit)).part
    optimum = search(loose.within(limit))
    assert alone is not None
    assert optimum is not None
    spared = bipar(loose.within(limit), optimum.optimum_ms, 1.2 * optimum.ms)
    assert spared.part is not None
    assert spared.part.ms == pytest.approx(alone.ms)
