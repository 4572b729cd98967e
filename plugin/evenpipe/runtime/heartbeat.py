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
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from evenpipe.runtime.beats import PREFIX, Beat, answered, apart, beats_of
from evenpipe.runtime.silence import BEATS, UNANSWERED, Silence, SilentPeer, has_timed_out, remedy

__all__ = ["Heartbeat"]

_TOLD_AFTER: Final = 16  # beats without which a watched process is told of, before the timeout ends those that wait
_LAST_BEAT_SECONDS: Final = 1.0


@dataclass
class _Life:
    """What a heartbeat and its thread share. The thread must not hold the heartbeat, with whose end it ends."""

    awaited: int | None = None
    stage: int | None = None
    failed: bool = False
    watched: dict[int, str] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def ends_well(self) -> bool:
        """Whether nobody should wait for this process any more, where it has ended."""
        return not self.failed and getattr(sys, "last_value", None) is None


class Heartbeat:
    """Lets all ranks know, through the store in which they found each other, that this one lives and whom it awaits.

    `ranks` are those of its pipeline, by stage; `timeout` is how long they may wait for each other, in which there are
    20 beats. When a rank has waited so long, all that wait for it, and for those that wait for it, have: each then
    follows who awaits whom to the one that is silent, or, if all of these live, finds the one anywhere in the job.
    Beats begin at once, or at `start` where the store would be held up by this host's own waits in it.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()
        self._rank = dist.get_rank()
        self._life = _Life(stage=list(ranks).index(self._rank) if self._rank in ranks else None)
        self._thread: threading.Thread | None = None
        shared = PrefixStore(PREFIX, _get_default_store())
        own = apart(shared)
        self._store = shared if own is None else own
        self._silence = Silence(self._store, self._rank, ranks, timeout)
        if own is not None:
            self.start()

    def start(self) -> None:
        """Beat from here on, until `stop`, the end of this object, or that of the interpreter."""
        if self._thread is None:
            beats = (self._store, self._rank, self._life, self._seconds / BEATS)
            self._thread = threading.Thread(target=_beat, args=beats, name="evenpipe-heartbeat", daemon=True)
            self._thread.start()
            weakref.finalize(self, _stop, self._thread, self._life)

    def watch(self, ranks: Iterable[int]) -> None:
        """Say, once, on standard error, which of these gives no sign of life when the timeout is nearly over.

        That is for waits that end the process by themselves and name nobody, as NCCL's watchdog does.
        """
        self._life.watched.update((rank, self._silence.name(rank)) for rank in ranks if rank != self._rank)

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
            if isinstance(error, SilentPeer) or not has_timed_out(error):
                raise
            raise SilentPeer(self._silence.line(missing, what)) from None


def _beat(store: Store, rank: int, life: _Life, seconds: float) -> None:
    """Beat, and look after those watched, until the end of this life or the store's."""
    told = False
    while True:
        try:
            Beat(time.time(), life.awaited, stage=life.stage).tell(store, rank)
            if life.watched:
                _look_after(life.watched, store, _TOLD_AFTER * seconds)
        except Exception as error:
            # Where this process has no more to do in the job, it may be the first to have ended.
            if life.watched and not told and not life.ended.is_set() and dist.is_initialized():
                _say(f"{UNANSWERED}; one that is silent will not be named")
                told = True
            if not isinstance(error, Unanswered):
                return
        if life.ended.wait(seconds):
            break
    if life.ends_well:
        with suppress(Exception):  # of the store, which may have ended
            Beat(time.time(), closed=True, stage=life.stage).tell(store, rank)


def _look_after(watched: dict[int, str], store: Store, longest: float) -> None:
    ranks = [*watched]
    for rank, beat in answered(lambda: beats_of(store, ranks)).items():
        if not beat.closed and (age := time.time() - beat.at) > longest:
            _say(f"{watched.pop(rank)} has given no sign of life for {age:.0f} s: {remedy()}")


def _say(line: str) -> None:
    with suppress(OSError, ValueError):  # of a standard error that is closed
        print(f"evenpipe: {line}", file=sys.stderr, flush=True)


def _stop(thread: threading.Thread, life: _Life) -> None:
    """Amid a beat it could not go on once the interpreter is torn down."""
    life.ended.set()
    thread.join(_LAST_BEAT_SECONDS)
