"""Swap and recompute of stages: savings that do not add up, a link that is shared, and peaks that hold."""

from __future__ import annotations

import numpy as np
import pytest

from evenpipe.partition.costs.recompute import Candidates, Picks, Recomputation, RecomputedBytes
from evenpipe.partition.costs.storages import Graph
from evenpipe.partition.dawnpiper.capuchin import Around, Fit, HostLink, Load, fit, weigh
from evenpipe.partition.profile import Profile, Storage
from tests.partition.profiles import assembled, random_profile, transformer


def chain(sizes: list[int], forward_ms: list[float]) -> Profile:
    """Nodes in a row; the backward of each needs what it reads, and what the last one makes is the output."""
    last = len(sizes) - 1
    storages = [
        Storage(nbytes=size, producer=n, users=(n + 1,) * (n < last), savers=(n + 1,) * (n < last))
        for n, size in enumerate(sizes)
    ]
    return assembled([(ms, 2 * ms) for ms in forward_ms], storages, [])


def whole(profile: Profile, loads: list[Load], *args: object) -> Fit | None:
    return fit(Graph(profile), 0, len(profile.nodes), loads, *args)  # type: ignore[arg-type]


def test_without_optimisation_all_is_kept_and_fits_or_not() -> None:
    assert whole(chain([10, 20, 30, 0], [1.0] * 4), [Load(3, 180)]) == Fit(0.0, 60, 0)
    assert whole(chain([10, 20, 30, 0], [1.0] * 4), [Load(3, 179)]) is None


def test_what_saves_most_bytes_a_millisecond_is_recomputed_first() -> None:
    """Node 1 makes 40 bytes in 1 ms, node 2 60 in 3 ms."""
    found = whole(chain([10, 40, 60, 10, 0], [5.0, 1.0, 3.0, 5.0, 1.0]), [Load(4, 4 * 90)], "recompute")
    assert found is not None
    assert (found.drop, found.recompute, found.extra_ms) == ((1,), (1,), 1.0)


def test_a_chain_of_dropped_storages_runs_again_from_what_is_kept() -> None:
    """Savings do not add up: behind a dropped storage, the next takes its producer too, which runs once for both."""
    saved = Graph(chain([10, 20, 30, 40, 0], [1.0, 2.0, 4.0, 8.0, 1.0])).saved(0, 5)
    assert Candidates(saved).chain(2) == (4.0, (2,), ())
    picks = Picks(Candidates(saved), np.full(4, np.inf), np.array([], np.int64))
    assert picks.order.tolist() == [0, 1, 2, 3]
    assert picks.rest.tolist() == [100, 90, 70, 40, 0]
    assert [picks.first(count)[1].ms for count in range(5)] == [0.0, 1.0, 3.0, 7.0, 15.0]


def two_from_one(nbytes: int = 5) -> Profile:
    """Node 0 takes 10 ms, and nobody saves what it makes; nodes 1 and 2 read it, and make 40 saved bytes each."""
    storages = [
        Storage(nbytes=nbytes, producer=0, users=(1, 2), savers=()),
        *[Storage(nbytes=40, producer=n, users=(3,), savers=(3,)) for n in (1, 2)],
    ]
    return assembled([(10.0, 1.0), (0.5, 1.0), (0.25, 1.0), (1.0, 1.0)], storages, [])


def test_what_two_chains_have_in_common_makes_the_second_cheaper() -> None:
    candidates = Candidates(Graph(two_from_one()).saved(0, 4))
    assert (candidates.chain(1).ms, candidates.chain(2).ms) == (10.5, 10.25)
    picks = Picks(candidates, np.full(2, np.inf), np.array([], np.int64))
    order = Graph(two_from_one()).order
    assert order.ms_a_byte.tolist() == [np.inf, 10.25 / 40, 10.25 / 40], "of the first pick; the second adds no more"
    assert picks.first(2)[1].ms == 10.75


def test_a_lower_bound_shares_what_chains_have_in_common_and_leaves_out_what_is_not_in_the_range() -> None:
    bound = RecomputedBytes(Graph(two_from_one(80)))
    nbytes = np.array([[80.0], [80.0]])
    assert bound.least_ms(nbytes, np.array([0, 1]), np.array([4]), np.inf).tolist() == [[10.75], [0.75]]


def test_a_lower_bound_has_nothing_of_what_could_be_kept_instead() -> None:
    """Of 5 bytes, 80 that are made of them can be had again: node 0 need not run a second time."""
    bound = RecomputedBytes(Graph(two_from_one(5)))
    assert bound.least_ms(np.array([[80.0]]), np.array([0]), np.array([4]), np.inf).tolist() == [[0.75]]


def test_pieces_that_keep_what_crosses_take_no_less_than_the_lower_bound() -> None:
    """Two pieces of a node that takes long, one that is saved, and one that is not."""
    times = [(10.0, 1.0), (1.0, 1.0), (0.1, 1.0)] * 2
    storages = [
        Storage(nbytes=1, producer=0, users=(1,), savers=()),
        Storage(nbytes=100, producer=1, users=(2,), savers=(2,)),
        Storage(nbytes=50, producer=2, users=(3,), savers=()),
        Storage(nbytes=1, producer=3, users=(4,), savers=()),
        Storage(nbytes=100, producer=4, users=(5,), savers=(5,)),
    ]
    graph = Graph(assembled(times, storages, []))
    found = fit(graph, 0, 6, [Load(2, 110)], "recompute")
    assert found is not None
    least = RecomputedBytes(graph).least_ms(np.array([[145.0]]), np.array([0]), np.array([6]), np.inf)
    assert least[0, 0] <= found.extra_ms


def test_a_swap_is_back_when_what_runs_again_reads_it() -> None:
    """Node 1 reads what node 0 made and swaps, and runs again for node 2's backward: the link has that long only."""
    storages = [
        Storage(nbytes=1_000_000, producer=0, users=(1,), savers=(0,)),
        Storage(nbytes=1_000_000, producer=1, users=(2,), savers=(2,)),
    ]
    saved = Graph(assembled([(1.0, 5.0)] * 3, storages, [])).saved(0, 3)
    host = HostLink(saved, 0.1, Around(100.0, before_ms=0.0), 2)  # 10 ms each way
    swapped = np.array([0])
    assert weigh(host, swapped, Recomputation(saved)).extra_ms == 0.0, "node 0's backward starts after 10 ms"
    picks = Picks(Candidates(saved), np.full(2, np.inf), swapped)
    _, again = picks.first(len(picks.order))
    assert again.nodes
    assert weigh(host, swapped, again).extra_ms == pytest.approx(again.ms + 10.0)


def test_to_drop_what_needs_something_that_was_sent_can_cost_memory() -> None:
    """Node 2 reads 100 bytes of an earlier stage that no backward needs: to run it again they must be kept.

    So only what node 3 makes can be dropped; in its backward the one micro-batch has it again.
    """
    storages = [
        Storage(nbytes=100, producer=0, users=(2,), savers=()),
        Storage(nbytes=30, producer=2, users=(3,), savers=(3,)),
        Storage(nbytes=20, producer=3, users=(4,), savers=(4,)),
    ]
    profile = assembled([(1.0, 1.0)] * 5, storages, [])
    candidates = Candidates(Graph(profile).saved(1, 5))
    assert candidates.chain(1).received == (0,)
    assert candidates.ms_a_byte.tolist() == [np.inf, 1 / 20], "30 bytes are not worth 100"
    found = fit(Graph(profile), 1, 5, [Load(2, 30 + 50)], "recompute")
    assert found is not None
    assert found.drop == (2,)
    assert fit(Graph(profile), 1, 5, [Load(2, 30 + 49)], "recompute") is None


def test_the_micro_batch_in_its_backward_has_what_was_dropped_again() -> None:
    """One copy: when the last is needed, the chain to it has run again; in pieces, from the 30 on."""
    graph = Graph(chain([10, 20, 30, 40, 0], [1.0] * 5))
    pieces = fit(graph, 0, 5, [Load(1, 99)], "recompute")
    assert pieces is not None
    assert pieces.kept + pieces.transient <= 99
    assert fit(graph, 0, 5, [Load(1, 69)], "recompute") is None
    many = fit(graph, 0, 5, [Load(10, 10 * 10 + 90)], "recompute")
    assert many is not None
    assert (many.kept, many.kept + many.transient) == (10, 100)


def test_layers_are_computed_again_one_after_the_other() -> None:
    """Six layers that save 1, 30 and 30 bytes: five micro-batches keep the 1s, and one layer is whole at a time."""
    graph = Graph(chain([1, 30, 30] * 6 + [0], [1.0] * 19))
    layered = 5 * 6 * 1 + (30 + 30)
    found = fit(graph, 0, 19, [Load(5, layered)], "recompute")
    assert found is not None
    assert 5 * found.kept + found.transient <= layered
    assert found.extra_ms <= 19.0
    assert found.drop == tuple(sorted({*range(1, 18)} - {*range(0, 18, 3)}))


def test_what_overlaps_with_compute_is_swapped_for_nothing() -> None:
    """10 ms to the backward on a link of 0.01 GB/s: 10 bytes take 0.001 ms."""
    found = whole(chain([10, 20, 30, 0], [1.0] * 4), [Load(3, 160)], "swap+recompute", 0.01, Around(10.0))
    assert found is not None
    assert found.extra_ms == 0.0
    assert found.swap
    assert not found.recompute


def test_a_link_carries_no_more_than_fits_beside_compute() -> None:
    """16 ms of compute a micro-batch; at 1 byte a ms a direction carries 16 of the 60 bytes for nothing."""
    profile = chain([10, 20, 30, 0], [1.0, 1.0, 1.0, 2.0])
    loads = [Load(6, 6 * 20.0)]
    found = whole(profile, loads, "swap+recompute", 1e-6, Around(1000.0))
    recomputed = whole(profile, loads, "recompute")
    assert found is not None
    assert recomputed is not None
    assert 0 < found.extra_ms <= recomputed.extra_ms


def test_where_forwards_follow_one_another_the_link_carries_no_more_than_fits_beside_one() -> None:
    """30 bytes leave in 3 ms, from the third of four ms of forward on: 2 ms before the next forward are too few."""
    profile = chain([10, 20, 30, 0], [1.0] * 4)
    loads = [Load(3, 3 * 30.0 + 30)]

    def extra_ms(around: Around) -> float:
        found = whole(profile, loads, "swap+recompute", 1e-5, around)
        assert found is not None
        return found.extra_ms

    assert extra_ms(Around(100.0)) == extra_ms(Around(100.0, after_ms=8.0, before_ms=4.0)) == 0.0
    assert extra_ms(Around(100.0, after_ms=0.0)) > 0.0, "GPipe's"


def test_what_a_backward_needs_first_comes_back_beside_what_is_before_it() -> None:
    """The last node reads 30 bytes, which take 3 ms."""
    loads = [Load(3, 3 * 4.0 + 60)]

    def extra_ms(before_ms: float) -> float:
        around = Around(100.0, 8.0, before_ms)
        found = whole(chain([1, 1, 30, 0], [1.0] * 4), loads, "swap+recompute", 1e-5, around)
        assert found is not None
        return found.extra_ms

    assert extra_ms(3.0) == 0.0
    assert extra_ms(2.9) > 0.0


def test_where_recomputing_takes_too_long_the_link_is_waited_for() -> None:
    profile = chain([10, 20, 30, 0], [100.0, 100.0, 100.0, 0.001])
    found = whole(profile, [Load(3, 3 * 35.0)], "swap+recompute", 1e-4)
    assert found is not None
    assert found.swap
    assert not found.recompute


@pytest.mark.parametrize("copies", [1, 2, 4, 8])
@pytest.mark.parametrize("optimize", ["recompute", "swap+recompute"])
def test_less_room_takes_longer_and_always_fits(copies: int, optimize: str) -> None:
    profile = transformer(3)
    total = Graph(profile).saved(0, len(profile.nodes)).total
    extra = [0.0]
    for share in (0.95, 0.8, 0.6, 0.5):
        found = whole(profile, [Load(copies, copies * share * total)], optimize, 0.5, Around(30.0 * (copies - 1)))
        assert found is not None
        assert copies * found.kept + found.transient <= copies * share * total
        extra.append(found.extra_ms)
    assert extra[-1] > extra[1] or extra[-1] == 0.0


def test_every_stage_that_holds_copies_has_its_own_room() -> None:
    """Under BPipe a partner holds some: they have to fit there, where nothing comes back for a backward."""
    profile = chain([10, 20, 30, 0], [1.0] * 4)
    assert whole(profile, [Load(3, 1000.0), Load(2, 119.0, own=False)]) is None
    found = whole(profile, [Load(3, 1000.0), Load(2, 119.0, own=False)], "recompute")
    assert found is not None
    assert 2 * found.kept <= 119


@pytest.mark.parametrize("host_gbps", [1e-6, 1e-4, 0.1, 0.5])
@pytest.mark.parametrize("seed", range(6))
def test_swapping_too_fits_wherever_recomputing_does_and_takes_no_longer(seed: int, host_gbps: float) -> None:
    """Swaps need room on their way, which may take more in the end, though they save most bytes a millisecond."""
    profile = random_profile(seed, 24) if seed else transformer(2)
    total = Graph(profile).saved(0, len(profile.nodes)).total
    for copies in (1, 2, 4, 8):
        for share in (0.9, 0.7, 0.5, 0.4, 0.3, 0.2):
            loads = [Load(copies, copies * total * share)]
            alone = whole(profile, loads, "recompute")
            if alone is not None:
                both = whole(profile, loads, "swap+recompute", host_gbps, Around(100.0 * (seed % 3 == 0)))
                assert both is not None
                assert both.extra_ms <= alone.extra_ms
