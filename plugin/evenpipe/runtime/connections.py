"""The links of one pipeline, opened between its ranks, and the queues of its devices, which their order goes by."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from itertools import chain
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store, _world

from evenpipe.runtime import streams
from evenpipe.runtime.channel import Awaiting, Channel, Group
from evenpipe.runtime.communicators import LinkT, communicator_bytes, ctas, links_line, most_links, rounds
from evenpipe.runtime.heartbeat import ANSWER_SECONDS, Heartbeat, answered, hearing, job_timeout, present
from evenpipe.runtime.processes import rest_at_exit
from evenpipe.schedule import Link, Queues, strictest

__all__ = ["Connections", "connect", "groups_over", "open_channels", "queues_line", "queues_of", "watched"]

_QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
#: How many a device has if nothing is said, and at most (CUDA C++ Programming Guide, environment variables).
_DEFAULT, _MOST = 8, 32
#: Settings by which a GPU or its host has what is enqueued wait for all that was enqueued before, on any stream.
_SETTINGS: Final[tuple[tuple[str, Queues], ...]] = (
    (_QUEUES, "one"),
    ("CUDA_LAUNCH_BLOCKING", "synchronised"),
)


def queues_of(ranks: Sequence[int], device: torch.device, held_up: Queues, heartbeat: Heartbeat) -> Queues:
    """Return what holds up the devices of `ranks`, all of which call it alike.

    `held_up`: what holds this one's up whatever its environment says, such as timers that synchronise. All get the same
    answer, the strictest of what holds for any. They tell each other through the store in which
    they once found each other, as a collective would open one more communicator. Raises SilentPeer, with what
    `heartbeat` knows of those missing, when one has not called it within the job's timeout.
    """
    settings = _SETTINGS if device.type == "cuda" else ()
    own = [held_up, *(kind for setting, kind in settings if os.environ.get(setting) == "1")]
    rank, keys, timeout = dist.get_rank(), [str(rank) for rank in ranks], job_timeout()
    root = PrefixStore(f"evenpipe/queues/{sha256(repr([*ranks]).encode()).hexdigest()}/", _get_default_store())
    # The same ranks may ask again, with other settings.
    store = PrefixStore(f"{root.add(f'asked/{rank}', 1)}/", root)
    store.set(str(rank), strictest(own))

    def missing() -> list[int]:
        come = present(store, keys)
        return [int(key) for key in keys if key not in come]

    with heartbeat.naming(missing, "what devices of the pipeline are like"):
        # A store that does not answer does not time out either.
        answered(lambda: store.wait(keys, timeout), timeout.total_seconds() + ANSWER_SECONDS)
    return strictest(cast(Queues, kind.decode()) for kind in store.multi_get(keys))


def groups_over(backend: str) -> int:
    """Return in how many of the job's groups this process communicates with others over `backend` on its device."""
    own = f"cuda:{backend}"
    return sum(group.size() > 1 and own in config.split(",") for group, config in _world.pg_backend_config.items())


def queues_line(counts: Mapping[str, int], environ: Mapping[str, str]) -> str:
    """Return a line that says how many hardware queues to ask CUDA for; "" where `environ` has enough.

    `counts`: streams by what they are of. Streams that share a queue hold each other up, as all do that pass one. One
    queue is no lack: Megatron demands it with tensor parallelism, and the order of messages goes by it.
    """
    given = environ.get(_QUEUES, "")
    have, need = int(given) if given.isdecimal() else _DEFAULT, min(sum(counts.values()), _MOST)
    if have == 1 or have >= need:
        return ""
    of = ", ".join(f"{count} of {what}" for what, count in counts.items() if count)
    why = f"{_QUEUES}={given}" if given else f"CUDA's default without {_QUEUES}"
    enough = f"{_QUEUES}={need} or more, up to {_MOST}" if need < _MOST else f"{_QUEUES}={_MOST}, the most there are"
    return (
        f"queues: {have} hardware queues of each GPU ({why}) for {sum(counts.values())} streams ({of}), and streams "
        f"that share a queue hold each other up: start with {enough}"
    )


@dataclass(frozen=True)
class Connections:
    """This rank's ends: `channels` by the link between stages; `layouts`, between hosts, beside those whose messages
    vary: of evictions, and of forward links if shapes do.

    `queues`: of the pipeline's devices, which its order goes by. `heartbeat` names a rank that is silent.
    `line` says what the pipeline's links are, and take. `named`: this rank's streams, which `compare` adds to.
    """

    channels: Mapping[Link, Channel]
    layouts: Mapping[Link, Channel]
    queues: Queues = "many"
    heartbeat: Heartbeat | None = None
    line: str = ""
    named: dict[str, streams.Stream] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """Return the device memory of this rank's communicators, which torch's allocator does not have."""
        on_device = sum(channel.device.type == "cuda" for channel in self.channels.values())
        return on_device * communicator_bytes(os.environ)

    def compare(self, more: Mapping[str, streams.Stream]) -> None:
        """Compare `more` streams of this rank, by name, with those before; say which are one to the device."""
        before = streams.sharing(self.named)
        self.named.update(more)
        if (line := streams.sharing(self.named)) != before:
            print(f"evenpipe: rank {dist.get_rank()}: {line}", file=sys.stderr, flush=True)

    def give_up(self) -> None:
        """A batch has failed: nobody waits for what is under way any more."""
        for channel in (*self.channels.values(), *self.layouts.values()):
            channel.give_up()
        if self.heartbeat is not None:
            self.heartbeat.give_up()

    def close(self) -> None:
        """Destroy every group, once nothing is under way."""
        for channel in (*self.channels.values(), *self.layouts.values()):
            channel.close()
        if self.heartbeat is not None:
            self.heartbeat.stop()


def connect(
    ranks: Sequence[int],
    links: Sequence[Link],
    backend: str,
    device: torch.device,
    shapes_vary: bool = False,
    held_up: Queues = "many",
) -> Connections:
    """Open `links` of the pipeline whose stage s runs on global rank `ranks[s]`; all its ranks must call it alike.

    Large messages hold up small ones behind them, so every link has a group of its own. What an evicted micro-batch
    consists of is told over gloo on the host, beside the activations; so are shapes between stages that vary.
    `held_up`: what holds up this device whatever its environment says.
    """
    rest_at_exit()
    timeout = job_timeout()
    kinds = {"evict", "forward"} if shapes_vary else {"evict"}
    varying = [link for link in links if link.kind in kinds]
    heartbeat = Heartbeat(ranks, timeout)

    def opened(some: Sequence[Link], what: str, backend: str, device: torch.device) -> dict[Link, Channel]:
        named = {link: (f"{link.kind}{what}", ranks[link.source], ranks[link.target]) for link in some}
        channels = open_channels(list(named.values()), backend, device, timeout, heartbeat)
        return {link: channels[name] for link, name in named.items() if name in channels}

    channels = opened(links, "", backend, device)
    rank = dist.get_rank()
    if rank == 0 and device.type == "cuda":
        waiting = int(any(link.kind == "load" for link in links))
        counts = {"compute": 1, "links": most_links(links), "loads that wait": waiting, "groups": groups_over(backend)}
        if said := queues_line(counts, os.environ):
            print(f"evenpipe: {said}", file=sys.stderr, flush=True)
    layouts = opened(varying, " layout", "gloo", torch.device("cpu"))
    queues = queues_of(ranks, device, held_up, heartbeat)
    heartbeat.watch(watched(device.type, channels.values()))
    heartbeat.start()
    connections = Connections(channels, layouts, queues, heartbeat, links_line(links, varying, device.type))
    connections.compare(streams_of(channels, rank, device))
    return connections


def streams_of(channels: Mapping[Link, Channel], rank: int, device: torch.device) -> dict[str, streams.Stream]:
    """Return, by name, the compute stream and those on which what a partner sends waits for what has to leave first."""
    waiting = {
        f"what waits before {link}": channel.side
        for link, channel in channels.items()
        if link.kind in ("evict", "load") and channel.target == rank
    }
    return {"compute": streams.current(device), **waiting}


def watched(device: str, channels: Iterable[Channel]) -> set[int]:
    """Return the ranks at the ends of `channels` whose silence no wait of this host's names.

    On CUDA it waits for nobody but for layouts: the rest is for NCCL's watchdog, which names a link.
    """
    return {rank for channel in channels for rank in (channel.source, channel.target)} if device == "cuda" else set()


def open_channels(
    links: Sequence[LinkT],
    backend: str,
    device: torch.device | str,
    timeout: timedelta | None = None,
    heartbeat: Heartbeat | None = None,
) -> dict[LinkT, Channel]:
    """Open a channel for every link (kind, source rank, target rank) that this rank is an end of, keyed by the link.

    All ranks of a pipeline call it with the same list; other pipelines may open theirs at the same time. Every channel
    has carried one message when this returns: NCCL makes a pair's communicator at its first operation and blocks both
    ends in it, so the first operations happen here, in the one order of :func:`rounds`. `timeout` (default: the job's)
    is how long a rank waits for another, now and later. One that the host waited for in vain is named;
    others know meanwhile for whom, with a `heartbeat`.
    Raises ValueError for a link from a rank to itself and for a backend other than "gloo" and "nccl".
    """
    for kind, source, target in links:
        if source == target:
            raise ValueError(f"link {kind} {source} -> {target} joins a rank to itself: leave it out")
    if backend not in ("gloo", "nccl"):  # told before an end counts what it has opened: both go by that
        raise ValueError(f"channels run over gloo or nccl, not {backend!r}: choose one of these as the backend")
    rank, timeout = dist.get_rank(), timeout or job_timeout()
    channels: dict[LinkT, Channel] = {}
    for link in chain.from_iterable(rounds(links)):
        kind, source, target = link
        if rank not in (source, target):
            continue
        peer, name = target if rank == source else source, f"link {kind} {source} -> {target}"
        awaiting: Awaiting = functools.partial(hearing, [peer], name)
        if heartbeat is not None:
            awaiting = functools.partial(heartbeat.awaiting, peer, name)
        with awaiting():
            group = _open_group(kind, source, target, backend, timeout)
            channels[link] = channel = Channel(source, target, group, device, awaiting)
            try:
                byte = torch.zeros(1, dtype=torch.uint8, device=device)
                transfer = channel.send([byte]) if rank == source else channel.receive([byte])
                transfer.wait()
            except BaseException:
                channel.give_up()
                raise
    return channels


def _open_group(kind: str, source: int, target: int, backend: str, timeout: timedelta) -> Group:
    """Join source (rank 0) and target (rank 1) in a group of their own.

    `new_group(use_local_synchronization=True)` cannot do this: it names a group after the number of groups that the
    process has, so two ends that are in different numbers of groups never find each other; and without that option
    every rank of every pipeline would have to make every group. Here both ends name the group after the link and the
    number of times they opened it.
    """
    rank = int(dist.get_rank() == target)
    root = PrefixStore(f"evenpipe/{kind}/{source}-{target}/", _get_default_store())
    opened = root.add(f"opened/{rank}", 1)
    store = PrefixStore(f"{opened}/", root)
    if backend == "gloo":
        return cast(Group, dist.ProcessGroupGloo(store, rank, 2, timeout))
    # Its stream is then of a pool that layers and a framework's own groups do not draw from.
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # after which NCCL's watchdog ends the process, with the group's name
    options.config.max_ctas = ctas(os.environ)
    options.global_ranks_in_group = [source, target]
    options.group_name = f"evenpipe-{kind}-{source}-{target}-{opened}"
    return cast(Group, dist.ProcessGroupNCCL(store, rank, 2, options))
