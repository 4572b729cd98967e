"""Bytes and times of ranges: what is counted range by range, once a storage and once a parameter."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.partition.costs.matrices import Costs, Coverage
from tests.partition.profiles import random_profile


@given(st.integers(0, 10_000), st.integers(2, 16))
def test_every_range_has_what_its_nodes_have(seed: int, nodes: int) -> None:
    profile = random_profile(seed, nodes)
    costs = Costs(profile)
    every = np.arange(costs.last + 1)
    ms, saved = costs.ms(every, every), costs.saved(every, every)
    static, messages = costs.static(every, every, versions=3), costs.messages(every, every)
    for first in range(costs.last):
        for last in range(first + 1, costs.last + 1):
            inside = set(range(costs.starts[first], costs.starts[last]))
            assert np.isclose(
                ms[first, last], sum(profile.nodes[n].forward_ms + profile.nodes[n].backward_ms for n in inside)
            )
            assert saved[first, last] == sum(one.nbytes for one in profile.storages if inside & set(one.savers))
            assert static[first, last] == sum(
                3 * one.nbytes + one.gradient_bytes + one.optimizer_bytes
                for one in profile.parameters
                if inside & set(one.users)
            )
            left = profile.nodes[costs.starts[first] - 1].cut_bytes if first else 0
            right = profile.nodes[costs.starts[last] - 1].cut_bytes if last < costs.last else 0
            assert messages[first, last] == left + right


@given(st.integers(0, 10_000), st.data())
def test_a_part_of_the_matrix_is_that_part(seed: int, data: st.DataObject) -> None:
    """Searches ask for the few ranges that they can use, in any choice of rows and columns."""
    costs = Costs(random_profile(seed, 14))
    every = np.arange(costs.last + 1)
    some = st.lists(st.sampled_from(every.tolist()), min_size=1, unique=True).map(sorted)
    firsts, lasts = np.array(data.draw(some)), np.array(data.draw(some))
    assert np.array_equal(costs.saved(firsts, lasts), costs.saved(every, every)[np.ix_(firsts, lasts)])


def test_only_allowed_cuts_are_boundaries_and_the_end_is_one() -> None:
    profile = random_profile(3, 12, cuts=0.3)
    allowed = [n + 1 for n, node in enumerate(profile.nodes[:-1]) if node.cut_allowed]
    assert Costs(profile).starts.tolist() == [0, *allowed, 12]


def test_a_thing_that_is_touched_thrice_counts_once() -> None:
    coverage = Coverage(6, [(7, (1, 3, 4))])
    weights = coverage.of(np.arange(7), np.arange(7))
    assert weights[0, 6] == weights[1, 4] == weights[2, 5] == weights[3, 4] == 7
    assert weights[0, 1] == weights[2, 3] == weights[5, 6] == 0
