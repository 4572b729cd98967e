"""Compute-balanced and memory-balanced points, Algorithm 2 on a drawn example, and cuts that send little."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.rivals.algorithm_2 import one_copy_bytes, printed_cuts, running_peak_cuts
from evenpipe.partition.costs.matrices import Costs
from evenpipe.partition.dawnpiper.balance import Balance, quiet
from evenpipe.partition.profile import Parameter, Storage
from tests.partition.profiles import assembled, problem_of, transformer


def test_algorithm_2_on_a_drawn_example() -> None:
    """Twelve nodes that keep 10 bytes each, three stages, copies 3 : 2 : 1.

    M_G = 120, sum = 3/3 + 3/2 + 3/1 = 5.5, so M_1 = 21.8, M_2 = 32.7, M_3 = 65.5: three nodes, four, and the rest.

        nodes   0  1  2 | 3  4  5  6 | 7  8  9 10 11
        peak   10 20 30 | 10 20 30 40
    """
    saved = [Storage(nbytes=10, producer=n, users=(), savers=(n,)) for n in range(12)]
    nodes = assembled([(1.0, 2.0)] * 12, saved, []).nodes
    assert one_copy_bytes(nodes) == 120
    assert running_peak_cuts(nodes, 120, [3, 2, 1]) == [2, 6]
    assert running_peak_cuts(nodes, 120, [4, 4, 4]) == [3, 7], "other schedules are balanced by their copies"
    assert running_peak_cuts(nodes, 400, [3, 2, 1]) == [7], "with a GPU's limit for M_G, the last stages are empty"


def test_algorithm_2_counts_the_peak_before_what_is_released() -> None:
    """Node 1 reads what node 0 made, 50 bytes that no backward needs: they are there when node 1 has made its own."""
    storages = [
        Storage(nbytes=50, producer=0, users=(1,)),
        *[Storage(nbytes=10, producer=n, users=(), savers=(n,)) for n in range(1, 6)],
    ]
    nodes = assembled([(1.0, 1.0)] * 6, storages, []).nodes
    assert one_copy_bytes(nodes) == 60
    assert running_peak_cuts(nodes, 60, [1, 1]) == [0]
    assert running_peak_cuts(nodes, 110, [1, 1]) == [1]
    assert running_peak_cuts(nodes, 130, [1, 1]) == [], "once they are released, 50 bytes of what is left are not there"


@pytest.mark.parametrize("name", ["pipedream", "1f1b", "gpipe"])
def test_memory_balanced_stages_hold_the_same(name: str) -> None:
    """Where nodes are small, peaks differ by little; the compute-balanced ones of PipeDream by more than half."""
    problem = problem_of(transformer(48), name, 4)
    balance = Balance(problem)
    peaks = problem.peaks(balance.memory_cuts()) or ()
    assert min(peaks) > 0.9 * max(peaks)
    uneven = problem.peaks(balance.compute_cuts()) or ()
    assert max(uneven) >= max(peaks)


def test_compute_balanced_stages_take_the_same() -> None:
    problem = problem_of(transformer(48), "gpipe", 4)
    cuts = Balance(problem).compute_cuts()
    times = [problem.costs.upto_ms[b] - problem.costs.upto_ms[a] for a, b in pairwise(cuts)]
    assert min(times) > 0.97 * max(times)


def test_the_memory_balanced_point_of_two_stages_is_left_of_the_compute_balanced_one() -> None:
    """As the paper's proof has it: earlier stages keep more copies."""
    problem = problem_of(transformer(24), "pipedream", 2)
    balance, last = Balance(problem), problem.costs.last
    assert balance.memory_cut(0, last, range(1), range(1, 2)) < balance.compute_cut(0, last, 1, 1)


def test_a_cut_moves_to_the_lowest_common_leaf_nearby() -> None:
    """Two branches, nodes 1 and 2, meet in node 3: behind that, one value is sent and not two. All nodes are quick."""
    storages = [
        Storage(nbytes=10, producer=0, users=(1, 2), savers=()),
        Storage(nbytes=10, producer=1, users=(3,), savers=()),
        Storage(nbytes=10, producer=2, users=(3,), savers=()),
        Storage(nbytes=10, producer=3, users=(4,), savers=()),
    ]
    times = [(10.0, 10.0), (0.01, 0.01), (0.01, 0.01), (0.01, 0.01), (10.0, 10.0)]
    profile = assembled(
        times, storages, [Parameter(name="w", nbytes=1, gradient_bytes=1, optimizer_bytes=1, users=(0,))]
    )
    assert [node.cut_bytes for node in profile.nodes] == [10, 20, 20, 10, 0]
    assert quiet(Costs(profile), 2).tolist() == [0, 1, 1, 4, 4, 5]


def test_what_is_sent_wherever_one_cuts_is_disregarded() -> None:
    """An embedding's output that the last node reads crosses every cut, and moves none of them."""

    def profile_with(embedding: int) -> Costs:
        storages = [
            Storage(nbytes=embedding, producer=0, users=(5,), savers=(5,)),
            *[Storage(nbytes=20 if n % 2 else 10, producer=n, users=(n + 1,), savers=()) for n in range(1, 5)],
        ]
        return Costs(assembled([(1.0, 1.0), *[(0.001, 0.001)] * 4, (1.0, 1.0)], storages, []))

    assert quiet(profile_with(1000), 2).tolist() == quiet(profile_with(1), 2).tolist()


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_algorithm_2_cuts_a_model_where_peaks_are_even_for_pipedream(stages: int) -> None:
    """It leaves out gradients and messages, and nodes are whole: peaks are not quite the same."""
    problem = problem_of(transformer(48), "pipedream", stages)
    balance = Balance(problem)
    printed = printed_cuts(problem)
    assert printed is not None
    peaks, by_time = problem.peaks(printed) or (), problem.peaks(balance.compute_cuts()) or ()
    assert max(peaks) < max(by_time)
    assert min(peaks) / max(peaks) > min(by_time) / max(by_time)


def test_layers_are_shared_out_evenly() -> None:
    problem = problem_of(transformer(8), "gpipe", 4)
    assert [problem.costs.layers.index(cut) for cut in Balance(problem).layer_cuts()] == [0, 2, 4, 7, 9]
