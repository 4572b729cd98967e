"""Four gloo processes that use channels, case by case, and write down for each case "ok" or what went wrong."""

import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from ranks import report
from torch import Tensor

from evenpipe.runtime.channel import Channel
from evenpipe.runtime.connections import open_channels

WORLD = 4
LIMIT = timedelta(seconds=30)
DOWN, UP, GO = ("forward", 0, 1), ("backward", 1, 0), ("evict", 0, 1)

Link = tuple[str, int, int]


def pipeline(ranks: Sequence[int]) -> list[Link]:
    """Every link of a BPipe pipeline: neighbours both ways, and the pairs of the folded pipeline both ways."""
    neighbours = list(pairwise(ranks))
    pairs = [pair for pair in zip(ranks, reversed(ranks), strict=True) if pair[0] < pair[1]]
    return [
        *(("forward", a, b) for a, b in neighbours),
        *(("backward", b, a) for a, b in neighbours),
        *(("evict", a, b) for a, b in pairs),
        *(("load", b, a) for a, b in pairs),
    ]


def opened(links: Sequence[Link]) -> dict[Link, Channel]:
    return open_channels(links, "gloo", "cpu")


def close(channels: dict[Link, Channel]) -> None:
    for channel in channels.values():
        channel.close()


def number(value: int) -> Tensor:
    return torch.tensor([value])


def every_link_of_a_pipeline_carries_its_own_messages_in_order(rank: int) -> None:
    """Fifty messages under way on every link of a four-stage pipeline at once, all posted before any is waited for."""
    links = pipeline(range(4))
    channels = opened(links)
    assert set(channels) == {link for link in links if rank in link[1:]}
    assert (len(channels), rank) in {(4, 0), (6, 1), (6, 2), (4, 3)}
    transfers = []
    inboxes: list[tuple[Link, int, Tensor]] = []
    for i in range(50):
        for link, channel in channels.items():
            if rank == channel.source:
                transfers.append(channel.send([number(1000 * links.index(link) + i)]))
            else:
                inboxes.append((link, i, number(-1)))
                transfers.append(channel.receive([inboxes[-1][2]]))
    for transfer in transfers:
        transfer.wait()
    assert all(inbox.item() == 1000 * links.index(link) + i for link, i, inbox in inboxes)
    close(channels)


def replicas_open_different_links_at_the_same_time(rank: int) -> None:
    """Two pipelines of two stages; the second opens its links twice over, so that it makes more groups."""
    mine = (0, 1) if rank < 2 else (2, 3)
    for _ in range(1 if rank < 2 else 2):
        channels = opened(pipeline(mine))
        link = ("evict", *mine)
        inbox = number(-1)
        if rank == mine[0]:
            channels[link].send([number(rank)]).wait()
        else:
            channels[link].receive([inbox]).wait()
            assert inbox.item() == mine[0]
        close(channels)


def between_two(act: Callable[[int, dict[Link, Channel]], None]) -> Callable[[int], None]:
    """Run `act` on ranks 0 and 1 with a channel each way, and one for a signal that rank 1 may start."""

    def case(rank: int) -> None:
        if rank < 2:
            channels = opened([DOWN, UP, GO])
            act(rank, channels)
            close(channels)

    case.__name__ = act.__name__
    return case


@between_two
def data_may_be_swapped_while_sending(rank: int, channels: dict[Link, Channel]) -> None:
    """The message once followed the tensor to its new memory: losses became NaN when outputs were deallocated early."""
    size = 1 << 20
    if rank == 0:
        tensor = torch.ones(size, requires_grad=True)
        sending = channels[DOWN].send([tensor])
        tensor.data = torch.zeros(1)
        others = [torch.full((size,), torch.nan) for _ in range(4)]  # would get the memory, were it free
        channels[GO].send([number(0)]).wait()
        sending.wait()
        assert len(others) == 4
    else:
        channels[GO].receive([number(0)]).wait()
        inbox = torch.zeros(size)
        channels[DOWN].receive([inbox]).wait()
        assert bool((inbox == 1).all())


@between_two
def data_may_be_swapped_while_receiving(rank: int, channels: dict[Link, Channel]) -> None:
    """The message goes to the memory that was given, which nobody else may get before."""
    size = 1 << 20
    if rank == 1:
        buffer = torch.zeros(size)
        receiving = channels[DOWN].receive([buffer])
        buffer.data = torch.zeros(1)
        others = [torch.zeros(size) for _ in range(4)]
        channels[UP].send([number(0)]).wait()
        receiving.wait()
        assert not any(bool(other.any()) for other in others)
    else:
        channels[UP].receive([number(0)]).wait()
        channels[DOWN].send([torch.ones(size)]).wait()


@between_two
def what_follows_a_message_starts_when_that_is_through(rank: int, channels: dict[Link, Channel]) -> None:
    """It may use the same memory; the host goes on, and what is posted behind it stays behind it."""
    size = 1 << 22
    if rank == 0:
        memory, last = torch.ones(size), number(-1)
        sending = channels[DOWN].send([memory])
        following = channels[UP].receive([memory], after=[sending])
        behind = channels[UP].receive([last])
        channels[GO].send([number(0)]).wait()  # only now the other end receives
        behind.wait()
        following.wait()
        sending.wait()
        assert bool((memory == 2).all())
        assert last.item() == 3
    else:
        answers = [channels[UP].send([torch.full((size,), 2.0)]), channels[UP].send([number(3)])]
        channels[GO].receive([number(0)]).wait()
        inbox = torch.zeros(size)
        channels[DOWN].receive([inbox]).wait()
        assert bool((inbox == 1).all())
        for answer in answers:
            answer.wait()


@between_two
def transfers_may_be_waited_for_in_any_order_and_twice(rank: int, channels: dict[Link, Channel]) -> None:
    inboxes = [torch.zeros(1000 * (i + 1)) for i in range(10)]
    if rank == 0:
        transfers = [channels[DOWN].send([torch.full_like(inbox, i)]) for i, inbox in enumerate(inboxes)]
    else:
        transfers = [channels[DOWN].receive([inbox]) for inbox in inboxes]
    for i in (9, 0, 5, 5, 1, 8, 2, 9, 7, 3, 6, 4):
        transfers[i].wait()
        assert rank == 0 or bool((inboxes[i] == i).all())


@between_two
def a_message_is_any_list_of_tensors(rank: int, channels: dict[Link, Channel]) -> None:
    """Mixed dtypes, a transposed tensor, a scalar, and empty tensors that take no part."""
    message = [
        torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
        torch.zeros(0),
        torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
        torch.tensor(True),
        torch.zeros(3, 0),
        torch.arange(5, dtype=torch.uint8),
    ]
    if rank == 0:
        channels[DOWN].send(message).wait()
        channels[DOWN].send([]).wait()
        channels[DOWN].send([torch.zeros(0)]).wait()
        channels[DOWN].send([number(1)]).wait()
    else:
        inbox = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in message]
        channels[DOWN].receive(inbox).wait()
        assert all(torch.equal(got, sent) for got, sent in zip(inbox, message, strict=True))
        last = number(-1)
        channels[DOWN].receive([last]).wait()
        assert last.item() == 1


@between_two
def a_link_has_one_direction(rank: int, channels: dict[Link, Channel]) -> None:
    forbidden = channels[DOWN].receive if rank == 0 else channels[DOWN].send
    with pytest.raises(ValueError, match="channel 0 -> 1: the "):
        forbidden([number(0)])


@between_two
def buffers_must_be_contiguous(rank: int, channels: dict[Link, Channel]) -> None:
    """A copy would be filled in place of the buffer."""
    if rank == 1:
        with pytest.raises(ValueError, match="contiguous buffers only"):
            channels[DOWN].receive([torch.zeros(2, 3).t()])


def closed_links_can_be_opened_again(rank: int) -> None:
    for _ in range(3):
        exchange(rank)


@between_two
def exchange(rank: int, channels: dict[Link, Channel]) -> None:
    inbox = number(-1)
    out, into = (DOWN, UP) if rank == 0 else (UP, DOWN)
    receiving = channels[into].receive([inbox])
    channels[out].send([number(rank)]).wait()
    receiving.wait()
    assert inbox.item() == 1 - rank


def links_wait_as_long_as_the_job_has_ranks_wait(rank: int) -> None:
    """They once waited for half an hour, whatever the user had said."""
    channels = opened(pipeline(range(WORLD)))
    assert {channel._group.options._timeout for channel in channels.values()} == {LIMIT}
    close(channels)
    close(channels)  # nothing to do twice


def a_rank_has_no_link_to_itself(rank: int) -> None:
    with pytest.raises(ValueError, match="leave it out"):
        opened([("forward", rank, rank)])


def an_unknown_backend_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="gloo or nccl, not 'mpi'"):
        open_channels([("forward", rank, (rank + 1) % WORLD)], "mpi", "cpu")


CASES: tuple[Callable[[int], None], ...] = (
    every_link_of_a_pipeline_carries_its_own_messages_in_order,
    replicas_open_different_links_at_the_same_time,
    data_may_be_swapped_while_sending,
    data_may_be_swapped_while_receiving,
    what_follows_a_message_starts_when_that_is_through,
    transfers_may_be_waited_for_in_any_order_and_twice,
    a_message_is_any_list_of_tensors,
    a_link_has_one_direction,
    buffers_must_be_contiguous,
    closed_links_can_be_opened_again,
    links_wait_as_long_as_the_job_has_ranks_wait,
    a_rank_has_no_link_to_itself,
    an_unknown_backend_is_refused,
)


def outcomes(rank: int, folder: Path) -> dict[str, str]:
    found = {}
    for case in CASES:
        try:
            case(rank)
            found[case.__name__] = "ok"
        except Exception:
            found[case.__name__] = traceback.format_exc()
    return found


if __name__ == "__main__":
    report(WORLD, outcomes, LIMIT)
