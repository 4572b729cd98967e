"""Links are opened in few rounds; hosts agree on their queues, and tell each other what messages are like."""

from __future__ import annotations

import os
import random
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from evenpipe.runtime.channel import Layouts, shapes_received, shapes_sent
from evenpipe.runtime.communicators import communicator_bytes, ctas, link_bytes, links_line, rounds
from evenpipe.runtime.connections import (
    _open_group,
    groups_over,
    open_channels,
    queues_line,
    queues_of,
    streams_of,
    watched,
)
from evenpipe.runtime.heartbeat import Heartbeat
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


CHANNELS = [SimpleNamespace(source=source, target=target) for source, target in ((4, 6), (6, 4), (6, 8), (6, 5))]


@pytest.mark.parametrize(("device", "ranks"), [("cuda", {4, 5, 6, 8}), ("cpu", set())])
def test_who_is_watched(device: str, ranks: set[int]) -> None:
    """NCCL's watchdog ends a process and names a link; gloo's waits time out on the host, which names a rank."""
    assert watched(device, CHANNELS) == ranks
    assert watched(device, []) == set()


class NCCL:
    """ProcessGroupNCCL's interface, as far as making one goes."""

    class Options(SimpleNamespace):
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace())

    def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
        self.options = options


def test_a_link_s_stream_is_of_high_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pool that layers' streams are not dealt from."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "ProcessGroupNCCL", NCCL, raising=False)
        group: Any = _open_group("load", 0, 1, "nccl", timedelta(minutes=1))
        assert group.options.is_high_priority_stream
    finally:
        dist.destroy_process_group()


def test_the_streams_that_are_compared_as_links_open() -> None:
    """That of compute, and those of what a partner sends, which waits for what has to leave first."""
    link, evict, load = Link("forward", 0, 1), Link("evict", 0, 3), Link("load", 3, 0)
    channels: Any = {
        one: SimpleNamespace(target=10 + one.target, side=SimpleNamespace(cuda_stream=5)) for one in (link, evict, load)
    }
    assert [*streams_of(channels, 10, torch.device("cpu"))] == ["compute", "what waits before load 3→0"]
    assert [*streams_of(channels, 13, torch.device("cpu"))] == ["compute", "what waits before evict 0→3"]


GPU, CPU = torch.device("cuda"), torch.device("cpu")


def ask(rank, store_path, results):
    """Of the job, of two pipelines, and of the job again; only the last rank's GPU has one queue, at first."""
    dist.init_process_group("gloo", store=dist.FileStore(store_path, 3), rank=rank, world_size=3)
    job, pipeline = range(3), [[0, 1], [2]][rank == 2]
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1" if rank == 2 else "8"
    heartbeat = Heartbeat(job, timedelta(minutes=1))
    found = [queues_of(ranks, GPU, "many", heartbeat) for ranks in (job, pipeline)]
    found.append(queues_of(job, CPU, "many", heartbeat))  # which has none
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1" if rank == 1 else "0"
    found.append(queues_of(job, GPU, "many", heartbeat))
    os.environ["CUDA_LAUNCH_BLOCKING"] = "0"
    found.append(queues_of(job, CPU, "synchronised" if rank == 0 else "many", heartbeat))
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    assert (groups_over("gloo"), groups_over("nccl")) == (1, 0)  # the job's
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2], [0, 1, 2])]
    assert len(groups) == 3
    assert groups_over("gloo") == (2 if rank == 2 else 3), "a group of one rank has no communicator"
    results.put((rank, [*found, queues_of(job, GPU, "many", heartbeat)]))
    dist.barrier()
    dist.destroy_process_group()


def test_all_ranks_get_the_same_answer(tmp_path):
    """Through their store, which needs no GPU."""
    results = mp.get_context("fork").Queue()
    mp.start_processes(ask, (str(tmp_path / "store"), results), nprocs=3, start_method="fork")
    found = dict(results.get() for _ in range(3))
    then = ["many", "synchronised", "synchronised", "many"]
    assert found == {0: ["one", "many", *then], 1: ["one", "many", *then], 2: ["one", "one", *then]}


#: Of a Megatron rank in the middle of a pipeline under BPipe.
STREAMS = {"compute": 1, "links": 6, "loads that wait": 1, "groups": 7}


@pytest.mark.parametrize("given", ["1", "15", "32"])
def test_one_queue_or_enough_are_nothing_to_speak_of(given):
    assert queues_line(STREAMS, {"CUDA_DEVICE_MAX_CONNECTIONS": given}) == ""
    assert queues_line({"compute": 1, "links": 2, "loads that wait": 0, "groups": 1}, {}) == ""


@pytest.mark.parametrize(
    ("environ", "have"),
    [
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "2"}, "2 hardware queues of each GPU (CUDA_DEVICE_MAX_CONNECTIONS=2)"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "8 hardware queues of each GPU (CUDA_DEVICE_MAX_CONNECTIONS=8)"),
        ({}, "8 hardware queues of each GPU (CUDA's default without CUDA_DEVICE_MAX_CONNECTIONS)"),
    ],
)
def test_fewer_than_there_are_streams_are_told_with_the_number_to_set(environ, have):
    assert queues_line(STREAMS, environ) == (
        f"queues: {have} for 15 streams (1 of compute, 6 of links, 1 of loads that wait, 7 of groups), and streams "
        "that share a queue hold each other up: start with CUDA_DEVICE_MAX_CONNECTIONS=15 or more, up to 32"
    )


def test_cuda_has_32_queues_at_most():
    many = {**STREAMS, "groups": 40}
    assert queues_line(many, {}).endswith(": start with CUDA_DEVICE_MAX_CONNECTIONS=32, the most there are")
    assert queues_line(many, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}) == ""


SHAPES = [[(3, 1, 16), ()], [], [(5,)]]
SENT = [(8, 16, 1 << 40), (), (3,), *[(n,) * (n % 7) for n in range(40)], *[(n,) * n for n in (31, 32, 70)], (1,)]


def send_and_receive(rank, store_path, results):
    store = dist.FileStore(store_path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    channels = open_channels([("layout", 0, 1)], "gloo", "cpu")
    layouts = Layouts(channels["layout", 0, 1])
    if rank == 0:
        for sizes in SENT:
            layouts.send(sizes)
        for shapes in SHAPES:
            layouts.send(shapes_sent([torch.empty(shape) for shape in shapes]))
    else:
        results.put(([layouts.receive() for _ in SENT], [shapes_received(layouts.receive()) for _ in SHAPES]))
    dist.barrier()
    dist.destroy_process_group()


def test_what_is_sent_is_received_in_order(tmp_path):
    results = mp.get_context("fork").Queue()
    torch.set_num_threads(1)
    mp.start_processes(send_and_receive, (str(tmp_path / "store"), results), nprocs=2, start_method="fork")
    assert results.get() == (SENT, SHAPES)
