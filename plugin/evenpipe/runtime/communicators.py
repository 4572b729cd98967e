"""The order in which links are opened, and what NCCL's communicators take: a device's thread blocks and memory."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Final, TypeVar

from evenpipe.schedule import Link

__all__ = ["LinkT", "communicator_bytes", "ctas", "link_bytes", "links_line", "most_links", "rounds"]

LinkT = TypeVar("LinkT", bound=tuple[str, int, int])


def rounds(links: Sequence[LinkT]) -> list[list[LinkT]]:
    """Deal `links` (kind, source rank, target rank) out so that in a round no rank has to do with two others.

    A greedy edge colouring: all links of two ranks, both ways, are in the first round that is free for both. A rank
    with n peers is busy in n rounds, so there are fewer than 2n: neighbours, wrapped around or not, and a partner make
    3 peers, and at most 4 rounds in the order of `evenpipe.schedule.links`, however many stages there are. So no rank
    is behind more than 3 other pairs in a row; one after the other along the model, the last would be behind p - 2.

    No deadlock if each rank opens its links round by round, in the order given here, even where opening one blocks both
    of its ends: that is one order of all links. Of those that are not open, the first in that order is the next one at
    either of its ends, so both are in it, and it opens.
    """
    busy: dict[int, set[int]] = defaultdict(set)
    of_pair: dict[frozenset[int], int] = {}
    dealt: dict[int, list[LinkT]] = defaultdict(list)
    for link in links:
        _, source, target = link
        pair = frozenset((source, target))
        if pair not in of_pair:
            of_pair[pair] = next(number for number in count() if number not in busy[source] | busy[target])
            busy[source].add(of_pair[pair])
            busy[target].add(of_pair[pair])
        dealt[of_pair[pair]].append(link)
    return [dealt[number] for number in sorted(dealt)]


_MIB: Final = 1 << 20
#: A communicator uses as many channels, each a thread block, as ncclConfig_t.maxCTAs allows (NCCL 2.30,
#: src/graph/connect.cc), and its sends and receives no more (src/graph/paths.cc); left to itself, up to 64. Links are
#: many, and run beside compute, which is to keep its SMs.
_CTAS: Final = 4
_MOST: Final = ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS")
_LEAST: Final = ("NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS")
#: Of one channel at the receiver's end, in bytes, unless the environment says else (src/init.cc, computeBuffSizes).
_BUFFERS: Final = {"NCCL_LL_BUFFSIZE": 1 << 19, "NCCL_LL128_BUFFSIZE": 4_915_200, "NCCL_BUFFSIZE": 1 << 22}
_GRANULE: Final = 2 * _MIB  # what processes share is allocated in such pieces (src/transport/p2p.cc, CUDA_IPC_MIN)


def ctas(environ: Mapping[str, str]) -> int:
    """Return the most thread blocks of a link: 4, or what `environ` has NCCL take."""
    most = min(_given(environ, *_MOST), default=_CTAS)
    return max([most, *_given(environ, *_LEAST)])


def communicator_bytes(environ: Mapping[str, str]) -> int:
    """Device memory of one communicator, at most: 40 MiB, if `environ` says nothing else.

    The receiver's buffers of every channel; the sender has fewer, and between nodes channels share some. A formula from
    the sources, not a measurement.
    """
    buffers = sum(next(iter(_given(environ, name)), default) for name, default in _BUFFERS.items())
    return ctas(environ) * -(-buffers // _GRANULE) * _GRANULE


def link_bytes(links: Sequence[Link], stage: int) -> int:
    """Device memory of the communicators that `stage` has with NCCL for its ends of `links`."""
    return _ends(links)[stage] * communicator_bytes(os.environ)


def links_line(links: Sequence[Link], described: Sequence[Link], device_type: str) -> str:
    """Return a line on how many communicators a stage has at most, what they take, and in how many rounds they open.

    `described`: the links of which hosts tell each other, in groups beside them, what messages consist of.
    """
    most, between_hosts = most_links(links), most_links(described)
    of_nccl = f"of NCCL, up to {most * communicator_bytes(os.environ) / _MIB:.0f} MiB of a GPU"
    memory = of_nccl if device_type == "cuda" else "of gloo"
    hosts = f", and {between_hosts} of gloo between hosts" if described else ""
    return f"links: at most {most} communicators a rank {memory}{hosts}; opened in {len(rounds(links))} rounds"


def most_links(links: Sequence[Link]) -> int:
    """Return of how many `links` a stage is an end, at most."""
    return max(_ends(links).values(), default=0)


def _ends(links: Sequence[Link]) -> Counter[int]:
    """Return for each stage how many links it is an end of."""
    return Counter(stage for link in links for stage in (link.source, link.target))


def _given(environ: Mapping[str, str], *names: str) -> list[int]:
    return [int(environ[name]) for name in names if environ.get(name, "").isdecimal()]
