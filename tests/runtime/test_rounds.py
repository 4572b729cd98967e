"""Links are opened in rounds, of which there are as many for 64 stages as for 4, and a rank has as many links."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from evenpipe.runtime.communicators import communicator_bytes, ctas, link_bytes, links_line, rounds
from evenpipe.schedule import Link, links, loop
from evenpipe.schedule.topology import vee

MIB = 1 << 20
PIPELINES = [
    (stages, chunks, pairs) for stages in (*range(2, 18), 31, 32, 64) for chunks in (1, 2, 3) for pairs in (False, True)
]


def _in_random_order(found: tuple[Link, ...], seed: int) -> list[tuple[str, int, int]]:
    """As placement may give ranks to stages."""
    ranks = random.Random(seed).sample(range(200), 1 + max(max(link.source, link.target) for link in found))
    return [(link.kind, ranks[link.source], ranks[link.target]) for link in found]


@pytest.mark.parametrize(("stages", "chunks", "pairs"), PIPELINES)
def test_no_rank_has_to_do_with_two_others_in_a_round_and_there_are_few(stages: int, chunks: int, pairs: bool) -> None:
    found = links(loop(stages, chunks), pairs)
    given = _in_random_order(found, stages)
    dealt = rounds(given)
    assert sorted(link for one in dealt for link in one) == sorted(given)
    for one in dealt:
        peers = {(rank, peer) for _, *ends in one for rank, peer in (ends, ends[::-1])}
        assert set(Counter(rank for rank, _ in peers).values()) == {1}
    for a, b in {frozenset(ends) for _, *ends in given}:
        assert sum(any({a, b} == set(ends) for _, *ends in one) for one in dealt) == 1
    assert len(dealt) <= 4
    assert max(Counter(rank for _, *ends in given for rank in ends).values()) <= 6


@pytest.mark.parametrize("chunks", [1, 2])
def test_how_many_links_open_one_after_the_other_does_not_depend_on_the_number_of_stages(chunks: int) -> None:
    """Opened in the order along the model, that was twice as many as there are stages."""

    def longest_chain(order: list[Link]) -> int:
        at = Counter[int]()
        for link in order:
            at[link.source] = at[link.target] = 1 + max(at[link.source], at[link.target])
        return max(at.values())

    chains = {}
    for stages in (8, 64):
        found = links(loop(stages, chunks), pairs=True)
        chains[stages] = longest_chain([link for one in rounds(found) for link in one])
        assert longest_chain(list(found)) > 2 * (stages - 1)
    assert chains[64] == chains[8] <= 8


def test_neighbours_open_as_even_and_odd_pairs_and_partners_together() -> None:
    found = rounds(links(loop(6), pairs=True))
    assert [{frozenset((link.source, link.target)) for link in one} for one in found] == [
        {frozenset(pair) for pair in ((0, 1), (2, 3), (4, 5))},
        {frozenset(pair) for pair in ((1, 2), (3, 4), (0, 5))},
        {frozenset([1, 4])},
    ]


def test_a_vee_needs_no_more() -> None:
    assert [len(rounds(links(vee(stages)))) for stages in (2, 3, 4, 64)] == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("environ", "blocks", "mib"),
    [
        ({}, 4, 40),
        ({"NCCL_MAX_CTAS": "2"}, 2, 20),
        ({"NCCL_MAX_NCHANNELS": "8", "NCCL_MAX_CTAS": "16"}, 8, 80),
        ({"NCCL_MIN_CTAS": "6"}, 6, 60),
        ({"NCCL_BUFFSIZE": "1048576", "NCCL_MAX_CTAS": ""}, 4, 32),
    ],
)
def test_a_communicator_is_small_unless_the_user_has_said_else(environ: dict[str, str], blocks: int, mib: int) -> None:
    assert (ctas(environ), communicator_bytes(environ)) == (blocks, mib * MIB)


def test_the_line_at_start_says_what_there_is_and_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    found = links(loop(8), pairs=True)
    assert [link_bytes(found, stage) // MIB for stage in range(8)] == [160, *[240] * 6, 160]
    evictions = [link for link in found if link.kind == "evict"]
    assert links_line(found, evictions, "cuda") == (
        "links: at most 6 communicators a rank of NCCL, up to 240 MiB of a GPU, and 1 of gloo between hosts; "
        "opened in 3 rounds"
    )
    # A stage hears the shapes of one neighbour, and tells the other one.
    shapes = [link for link in found if link.kind == "forward"]
    assert ", and 3 of gloo between hosts; " in links_line(found, [*evictions, *shapes], "cpu")
    plain = links(loop(8))
    assert links_line(plain, (), "cpu") == "links: at most 4 communicators a rank of gloo; opened in 2 rounds"
