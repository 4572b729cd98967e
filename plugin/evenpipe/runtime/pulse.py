"""Signs of life of a job's ranks, and the name of the one that the others wait for in vain."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import ClassVar, Final, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

__all__ = ["Pulse", "SilentPeer"]

_BEATS: Final = 20  # in a timeout
_SILENT: Final = 16  # beats without which a watched process is told of, before the timeout ends those that wait
_MISSED: Final = 5  # beats without which a process is taken for dead: a busy host may delay some
_ANSWER_SECONDS: Final = 5.0  # the store may be in the process that is silent
_LAST_BEAT_SECONDS: Final = 1.0
_REMEDY: Final = (
    "look after its process and its host; if it only takes long, raise the timeout of torch.distributed "
    "(Megatron-LM: --distributed-timeout-minutes, DeepSpeed: init_distributed(timeout=...))"
)


class SilentPeer(RuntimeError):
    """Nothing came from a rank for as long as ranks may wait for each other. The message is one line, for the user."""

    one_line: ClassVar = True


class _Beat(NamedTuple):
    """When a process was last heard of, in seconds since 1970, and the rank that it was waiting for.

    Clocks of hosts are taken to agree within some beats, as NTP has them. Infinity: it opens its links, without beats.
    """

    at: float
    awaited: int | None


class Pulse:
    """Lets all ranks know, through the store in which they found each other, that this one lives and whom it awaits.

    `ranks` are those of its pipeline, by stage; `timeout` is how long they may wait for each other, in which there are
    20 beats. When a rank has waited so long, all that wait for it, and for those that wait for it, have: each then
    follows who awaits whom to the one that is silent, or, if all of these live, finds the one anywhere in the job.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta) -> None:
        self._ranks = list(ranks)
        self._seconds = timeout.total_seconds()
        self._store = PrefixStore("evenpipe/pulse/", _get_default_store())
        self._rank = dist.get_rank()
        self._awaited: list[int | None] = [None]  # which the thread reads
        self._watched = dict[int, str]()
        self._ended = threading.Event()

    def start(self) -> None:
        """Beat from here on, until `stop`, the end of this object, or that of the interpreter."""
        beats = (self._store, str(self._rank), self._awaited, self._watched, self._seconds / _BEATS, self._ended)
        thread = threading.Thread(target=_beat, args=beats, name="evenpipe-pulse", daemon=True)
        thread.start()
        weakref.finalize(self, _stop, thread, self._ended)

    def watch(self, ranks: Iterable[int]) -> None:
        """Say, once, on standard error, which of these gives no sign of life when the timeout is nearly over.

        That is for waits that end the process by themselves and name nobody, as NCCL's watchdog does.
        """
        self._watched.update((rank, self._name(rank)) for rank in ranks if rank != self._rank)

    def stop(self) -> None:
        """No batch follows."""
        self._ended.set()

    @contextmanager
    def opening(self, peer: int, what: str) -> Iterator[None]:
        """Before `start`, the same as `awaiting`: the host waits in the store, which then takes no beats from it."""
        self._store.set(str(self._rank), json.dumps(_Beat(math.inf, peer)))
        with self.awaiting(peer, what):
            yield

    @contextmanager
    def awaiting(self, peer: int, what: str) -> Iterator[None]:
        """Inside, the host waits for `what` of `peer`. Raises SilentPeer when that has timed out."""
        self._awaited[0] = peer
        try:
            yield
        except RuntimeError as error:
            # It stays awaited: others are about to ask.
            if isinstance(error, SilentPeer) or not _has_timed_out(error):
                raise
            raise SilentPeer(self._line(peer, what)) from None
        self._awaited[0] = None

    def _line(self, peer: int, what: str) -> str:
        found: list[str] = []
        asking = threading.Thread(target=lambda: found.append(self._found(peer)), daemon=True)
        asking.start()
        asking.join(_ANSWER_SECONDS)
        silent = found[0] if found else f"{self._name(peer)}, or the host that the ranks met on, does not answer"
        return f"{silent}: {self._name(self._rank)} waited {self._seconds:g} s for {what}: {_REMEDY}"

    def _found(self, peer: int) -> str:
        """Who is silent, where this rank waits for `peer`."""
        now = time.time()
        beats = {rank: beat for rank in range(dist.get_world_size()) if (beat := self._beat_of(rank)) is not None}
        alive = {rank for rank, beat in beats.items() if now - beat.at < _MISSED * self._seconds / _BEATS}
        passed = {self._rank}
        while peer in alive and (further := beats[peer].awaited) is not None and further not in passed:
            passed.add(peer)
            peer = further
        peer = next((rank for rank in beats if rank not in alive), peer) if peer in alive else peer
        if peer not in beats:
            return f"{self._name(peer)} has not come to open its links"
        if math.isinf(beats[peer].at):
            return f"{self._name(peer)} has begun to open its links, and not come further"
        if peer in alive:
            return (
                f"{self._name(peer)} sends nothing, though its process lives (between two batches of 2bw with bpipe, a "
                "collective of your own needs a drain before it)"
            )
        return f"{self._name(peer)} has given no sign of life for {now - beats[peer].at:.0f} s"

    def _beat_of(self, rank: int) -> _Beat | None:
        key = str(rank)
        return _Beat(*json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _name(self, rank: int) -> str:
        return f"rank {rank} (stage {self._ranks.index(rank)})" if rank in self._ranks else f"rank {rank}"


def _has_timed_out(error: RuntimeError) -> bool:
    """Whether that is what gloo, or the store, says."""
    return any(words in str(error).lower() for words in ("timed out", "timeout"))


def _beat(
    store: PrefixStore,
    key: str,
    awaited: list[int | None],
    watched: dict[int, str],
    seconds: float,
    ended: threading.Event,
) -> None:
    try:
        while True:
            store.set(key, json.dumps(_Beat(time.time(), awaited[0])))
            for rank in list(watched):
                _look_at(store, rank, watched, _SILENT * seconds)
            if ended.wait(seconds):
                return
    except Exception:
        return  # the store has ended before this process


def _look_at(store: PrefixStore, rank: int, watched: dict[int, str], longest: float) -> None:
    if store.check([str(rank)]) and (age := time.time() - _Beat(*json.loads(store.get(str(rank)))).at) > longest:
        name = watched.pop(rank)
        print(f"evenpipe: {name} has given no sign of life for {age:.0f} s: {_REMEDY}", file=sys.stderr, flush=True)


def _stop(thread: threading.Thread, ended: threading.Event) -> None:
    """Amid a beat it could not go on once the interpreter is torn down."""
    ended.set()
    thread.join(_LAST_BEAT_SECONDS)
