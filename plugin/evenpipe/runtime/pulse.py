"""Signs of life of a job's ranks, and the name of the one that the others wait for in vain."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as Unanswered
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar, Final

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from evenpipe.runtime.beats import Beat, answered, apart, beats_of

__all__ = ["Pulse", "SilentPeer"]

_BEATS: Final = 20  # in a timeout
_DEAD_AFTER: Final = 5  # beats without which a process is taken for dead, once waits have timed out: hosts may be busy
_TOLD_AFTER: Final = 16  # beats without which a watched process is told of, before the timeout ends those that wait
_LAST_BEAT_SECONDS: Final = 1.0
_REMEDY: Final = (
    "look after its process and its host; if it only takes long, raise the timeout of torch.distributed "
    "(Megatron-LM: --distributed-timeout-minutes, DeepSpeed: init_distributed(timeout=...))"
)
_UNANSWERED: Final = "the host on which the ranks met does not answer"


class SilentPeer(RuntimeError):
    """Nothing came from a rank for as long as ranks may wait for each other. The message is one line, for the user."""

    one_line: ClassVar = True


@dataclass
class _Life:
    """What a pulse and its thread share. The thread must not hold the pulse, with whose end it ends."""

    awaited: int | None = None
    failed: bool = False
    watched: dict[int, str] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def ends_well(self) -> bool:
        """Whether nobody should wait for this process any more, where it has ended."""
        return not self.failed and getattr(sys, "last_value", None) is None


class Pulse:
    """Lets all ranks know, through the store in which they found each other, that this one lives and whom it awaits.

    `ranks` are those of its pipeline, by stage; `timeout` is how long they may wait for each other, in which there are
    20 beats. When a rank has waited so long, all that wait for it, and for those that wait for it, have: each then
    follows who awaits whom to the one that is silent, or, if all of these live, finds the one anywhere in the job.
    Beats begin at once, or at `start` where the store would be held up by this host's own waits in it.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta) -> None:
        self._ranks = list(ranks)
        self._seconds = timeout.total_seconds()
        self._rank = dist.get_rank()
        self._life = _Life()
        self._thread: threading.Thread | None = None
        shared = PrefixStore("evenpipe/pulse/", _get_default_store())
        own = apart(shared)
        self._store = shared if own is None else own
        if own is not None:
            self.start()

    def start(self) -> None:
        """Beat from here on, until `stop`, the end of this object, or that of the interpreter."""
        if self._thread is None:
            beats = (self._store, self._rank, self._life, self._seconds / _BEATS)
            self._thread = threading.Thread(target=_beat, args=beats, name="evenpipe-pulse", daemon=True)
            self._thread.start()
            weakref.finalize(self, _stop, self._thread, self._life)

    def watch(self, ranks: Iterable[int]) -> None:
        """Say, once, on standard error, which of these gives no sign of life when the timeout is nearly over.

        That is for waits that end the process by themselves and name nobody, as NCCL's watchdog does.
        """
        self._life.watched.update((rank, self._name(rank)) for rank in ranks if rank != self._rank)

    def give_up(self) -> None:
        """Others may wait for what does not come from here: they are to miss this process when it has ended."""
        self._life.failed = True

    def stop(self) -> None:
        """No batch follows. Nobody misses this process, unless it was given up."""
        self._life.ended.set()

    @contextmanager
    def awaiting(self, peer: int, what: str) -> Iterator[None]:
        """Inside, the host waits for `what` of `peer`. Raises SilentPeer when that has timed out."""
        self._life.awaited = peer
        with self.naming(lambda: [peer], what):
            yield
        self._life.awaited = None  # else it stays awaited: others are about to ask

    @contextmanager
    def naming(self, missing: Callable[[], Iterable[int]], what: str) -> Iterator[None]:
        """Inside, the host waits for `what` of several, of whom `missing` asks the store which have not come."""
        try:
            yield
        except (RuntimeError, Unanswered) as error:
            self.give_up()
            if isinstance(error, SilentPeer) or not _has_timed_out(error):
                raise
            raise SilentPeer(
                f"{self._silent(missing)}: {self._name(self._rank)} waited {self._seconds:g} s for {what}: {_REMEDY}"
            ) from None

    def _silent(self, missing: Callable[[], Iterable[int]]) -> str:
        try:
            return answered(lambda: self._found(missing()))
        except (RuntimeError, Unanswered):
            return _UNANSWERED

    def _found(self, peers: Iterable[int]) -> str:
        """Who is silent, where this rank waits for `peers`."""
        beats = beats_of(self._store, self._ranks)
        alive = self._alive(beats)
        ends = {self._end_of_waits(peer, beats, alive) for peer in peers}
        silent = ends - alive
        if not silent:
            beats = beats_of(self._store, range(dist.get_world_size()))
            alive = self._alive(beats)
            silent = {*sorted({*beats} - alive)[:1]} or ends
        return " and ".join(self._said_of(rank, beats.get(rank), rank in alive) for rank in sorted(silent))

    def _alive(self, beats: dict[int, Beat]) -> set[int]:
        earliest = time.time() - _DEAD_AFTER * self._seconds / _BEATS
        return {rank for rank, beat in beats.items() if beat.closed or beat.at > earliest}

    def _end_of_waits(self, peer: int, beats: dict[int, Beat], alive: set[int]) -> int:
        """The one whom `peer` waits for, directly or not, and who waits for nobody, or is dead."""
        passed = {self._rank}
        while peer in alive and (further := beats[peer].awaited) is not None and further not in passed:
            passed.add(peer)
            peer = further
        return peer

    def _said_of(self, rank: int, beat: Beat | None, alive: bool) -> str:
        if beat is None:
            return f"{self._name(rank)} has not opened its links"
        if beat.closed:
            return f"{self._name(rank)} has closed its links"
        if alive:
            return (
                f"{self._name(rank)} sends nothing, though its process lives (between two batches of 2bw with bpipe, a "
                "collective of your own needs a drain before it)"
            )
        return f"{self._name(rank)} has given no sign of life for {time.time() - beat.at:.0f} s"

    def _name(self, rank: int) -> str:
        return f"rank {rank} (stage {self._ranks.index(rank)})" if rank in self._ranks else f"rank {rank}"


def _has_timed_out(error: Exception) -> bool:
    """Whether that is what gloo, or the store, says, or whoever asked it."""
    return isinstance(error, Unanswered) or any(words in str(error).lower() for words in ("timed out", "timeout"))


def _beat(store: Store, rank: int, life: _Life, seconds: float) -> None:
    """Beat, and look after those watched, until the end of this life or the store's."""
    told = False
    while True:
        try:
            Beat(time.time(), life.awaited).tell(store, rank)
            if life.watched:
                _look_after(life.watched, store, _TOLD_AFTER * seconds)
        except Exception as error:
            # Where this process has no more to do in the job, it may be the first to have ended.
            if life.watched and not told and not life.ended.is_set() and dist.is_initialized():
                _say(f"{_UNANSWERED}; one that is silent will not be named")
                told = True
            if not isinstance(error, Unanswered):
                return
        if life.ended.wait(seconds):
            break
    if life.ends_well:
        with suppress(Exception):  # of the store, which may have ended
            Beat(time.time(), closed=True).tell(store, rank)


def _look_after(watched: dict[int, str], store: Store, longest: float) -> None:
    ranks = [*watched]
    for rank, beat in answered(lambda: beats_of(store, ranks)).items():
        if not beat.closed and (age := time.time() - beat.at) > longest:
            _say(f"{watched.pop(rank)} has given no sign of life for {age:.0f} s: {_REMEDY}")


def _say(line: str) -> None:
    with suppress(OSError, ValueError):  # of a standard error that is closed
        print(f"evenpipe: {line}", file=sys.stderr, flush=True)


def _stop(thread: threading.Thread, life: _Life) -> None:
    """Amid a beat it could not go on once the interpreter is torn down."""
    life.ended.set()
    thread.join(_LAST_BEAT_SECONDS)
