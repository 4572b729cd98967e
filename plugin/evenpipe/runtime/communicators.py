"""How many communicators the links of a pipeline take, and what NCCL's take: a device's thread blocks and memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from evenpipe.runtime.rounds import rounds
from evenpipe.schedule import Link

__all__ = ["communicator_bytes", "ctas", "link_bytes", "links_line", "most_links"]

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
    """The most thread blocks of a link: 4, or what `environ` has NCCL take."""
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


def links_line(links: Sequence[Link], told: Sequence[Link], device_type: str) -> str:
    """For people: how many communicators a stage has at most, what they take, and in how many rounds they open.

    `told`: of which links hosts tell each other, in groups beside them, what messages consist of.
    """
    most, beside = most_links(links), most_links(told)
    of_nccl = f"of NCCL, up to {most * communicator_bytes(os.environ) / _MIB:.0f} MiB of a GPU"
    taken = of_nccl if device_type == "cuda" else "of gloo"
    hosts = f", and {beside} of gloo between hosts" if told else ""
    return f"links: at most {most} communicators a rank {taken}{hosts}; opened in {len(rounds(links))} rounds"


def most_links(links: Sequence[Link]) -> int:
    """Return of how many `links` a stage is an end, at most."""
    return max(_ends(links).values(), default=0)


def _ends(links: Sequence[Link]) -> Counter[int]:
    """Of each stage, how many links it is an end of."""
    return Counter(stage for link in links for stage in (link.source, link.target))


def _given(environ: Mapping[str, str], *names: str) -> list[int]:
    return [int(environ[name]) for name in names if environ.get(name, "").isdecimal()]
