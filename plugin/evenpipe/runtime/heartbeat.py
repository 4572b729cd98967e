"""Signs of life of a job's ranks, and the name of the one that the others wait for in vain."""

from __future__ import annotations

import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Unanswered
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar, Final, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

__all__ = [
    *("ANSWER_SECONDS", "Beat", "Heartbeat", "SilentPeer", "answered", "apart", "beats_of", "hearing", "how_to_raise"),
    *("job_timeout", "present", "silent_peer", "wait_for"),
]

#: What a job's timeout is set with, by the module whose presence tells who has set it.
_SET_BY: Final = {
    "evenpipe.train.process": "--timeout-minutes",
    "megatron.training": "--distributed-timeout-minutes",
    "deepspeed": "deepspeed.init_distributed(timeout=...)",
}


def job_timeout() -> timedelta:
    """Return the timeout of the job's default process group, or torch's default where its backend tells none.

    That is Megatron-LM's --distributed-timeout-minutes and the `timeout` of `deepspeed.init_distributed` or
    `torch.distributed.init_process_group`. Every backend keeps it in the options that it was made with.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed has been started"
    for device in world._device_types:
        backend = world._get_backend(device)
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps gloo's.
        options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return dist.default_pg_timeout


def how_to_raise() -> str:
    """Return what this job's timeout is set with: the flag, or the call, of what has started it."""
    given = (how for module, how in _SET_BY.items() if module in sys.modules)
    return next(given, "torch.distributed.init_process_group(timeout=...)")


_PREFIX: Final = "evenpipe/heartbeat/"
ANSWER_SECONDS: Final = 5.0  # within which a store answers, unless the process that keeps it stands still

T = TypeVar("T")


class Beat(NamedTuple):
    """A process's last sign of life, in seconds since 1970; the rank it was waiting for, and its stage.

    Clocks of hosts are taken to agree within some beats, as NTP has them. `closed`: no further beat follows.
    """

    at: float
    awaited: int | None = None
    closed: bool = False
    stage: int | None = None

    def write(self, store: Store, rank: int) -> None:
        """Write it into `store` for that `rank`."""
        store.set(str(rank), json.dumps(self))


def beats_of(store: Store, ranks: Iterable[int]) -> dict[int, Beat]:
    """Return the last beat of each of `ranks` that has beaten, in few round trips, however many they are."""
    keys = present(store, [str(rank) for rank in ranks])
    return {int(key): Beat(*json.loads(beat)) for key, beat in zip(keys, store.multi_get(keys), strict=True)}


def present(store: Store, keys: list[str]) -> list[str]:
    """Return the `keys` that `store` has. It says only whether it has all it is asked for: few may be missing."""
    if not keys or store.check(keys):
        return keys
    if len(keys) == 1:
        return []
    half = len(keys) // 2
    return [*present(store, keys[:half]), *present(store, keys[half:])]


def apart(store: Store) -> Store | None:
    """Return the same store over a connection of its own: whoever waits in a TCPStore's holds it up. None without one.

    Before torch 2.8 stores have no `clone`, and those that are written in Python may lack it.
    """
    try:
        return cast(Store, store.clone())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return None


def answered(ask: Callable[[], T], seconds: float = ANSWER_SECONDS) -> T:
    """Return or raise what `ask` does; raise concurrent.futures.TimeoutError after `seconds`: a store may hang."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="evenpipe-asking", daemon=True).start()
    return answer.result(seconds)


#: In a timeout.
_BEATS: Final = 20
#: Beats without which a process is taken for dead, once waits have timed out: hosts may be busy.
_DEAD_AFTER: Final = 5
#: Of ranks that live all the same, so many are named.
_MOST_NAMED: Final = 2
_LONGEST_SEARCH_SECONDS: Final = 3 * ANSWER_SECONDS
_UNANSWERED: Final = "the host on which the ranks met does not answer"


class SilentPeer(RuntimeError):
    """Nothing came from a rank for as long as ranks may wait for each other. The message is one line, for the user."""

    one_line: ClassVar = True


class Silence:
    """Finds out who is silent where `rank` has waited for `timeout`. `ranks`: its pipeline by stage (none: unknown)."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._ranks = list(ranks)
        self._seconds = timeout.total_seconds()

    def name(self, rank: int, beats: Mapping[int, Beat] | None = None) -> str:
        """Return how people call `rank`, by its stage too where that is known."""
        stage = beats[rank].stage if beats and rank in beats else None
        if rank in self._ranks:
            stage = self._ranks.index(rank)
        return f"rank {rank}" if stage is None else f"rank {rank} (stage {stage})"

    def line(self, missing: Callable[[], Iterable[int]], what: str) -> str:
        """Return the line on a wait for `what` of several, of whom `missing` asks the store which have not come."""
        try:
            name, said = answered(lambda: self._found(missing()))
        except (RuntimeError, Unanswered):
            name, said = self.name(self._rank), _UNANSWERED
        return f"{said}: {name} waited {self._seconds:g} s for {what}: {remedy()}"

    def line_of(self, peers: Iterable[int], what: str) -> str:
        """Return the line on a wait for `what` of `peers`."""
        return self.line(lambda: peers, what)

    def anywhere(self) -> str | None:
        """Return the line on a wait for nobody in particular; None where all ranks that have ever beaten live."""
        beats = beats_of(self._store, range(dist.get_world_size()))
        silent = sorted({*beats} - self._alive(beats) - {self._rank})
        return self.line_of(silent[:1], "other ranks") if silent else None

    def _found(self, peers: Iterable[int]) -> tuple[str, str]:
        """Return this rank's name, and who is silent, where it waits for `peers`."""
        beats = beats_of(self._store, self._ranks or range(dist.get_world_size()))
        alive = self._alive(beats)
        ends = {self._end_of_waits(peer, beats, alive) for peer in peers}
        silent = ends - alive
        if not silent:
            beats = beats_of(self._store, range(dist.get_world_size()))
            alive = self._alive(beats)
            silent = {*sorted({*beats} - alive)[:1]} or ends
        name = self.name(self._rank, beats)
        if len(silent) > _MOST_NAMED and silent <= alive:
            return name, f"all of the {len(silent)} other ranks live, and one of them does not get there"
        return name, " and ".join(self._said_of(rank, beats, rank in alive) for rank in sorted(silent))

    def _alive(self, beats: Mapping[int, Beat]) -> set[int]:
        earliest = time.time() - _DEAD_AFTER * self._seconds / _BEATS
        return {rank for rank, beat in beats.items() if beat.closed or beat.at > earliest}

    def _end_of_waits(self, peer: int, beats: Mapping[int, Beat], alive: set[int]) -> int:
        """Return the rank that `peer` waits for, directly or not, and that waits for nobody, or is dead."""
        passed = {self._rank}
        while peer in alive and (further := beats[peer].awaited) is not None and further not in passed:
            passed.add(peer)
            peer = further
        return peer

    def _said_of(self, rank: int, beats: Mapping[int, Beat], alive: bool) -> str:
        name, beat = self.name(rank, beats), beats.get(rank)
        if beat is None:
            return f"{name} has not opened its links"
        if beat.closed:
            return f"{name} has closed its links"
        if alive:
            return (
                f"{name} sends nothing, though its process lives (between two batches of 2bw with bpipe, a "
                "collective of your own needs a drain before it)"
            )
        return f"{name} has given no sign of life for {time.time() - beat.at:.0f} s"


def remedy() -> str:
    """Return what to do about a rank that is silent."""
    return f"look after its process and its host; if it only takes long, raise the timeout ({how_to_raise()})"


def has_timed_out(error: BaseException) -> bool:
    """Return whether that is what gloo, or the store, says, or whoever asked it."""
    return isinstance(error, Unanswered) or any(words in str(error).lower() for words in ("timed out", "timeout"))


@contextmanager
def hearing(ranks: dist.ProcessGroup | Sequence[int] | None, what: str) -> Iterator[None]:
    """Inside, the host waits for `what` of all of `ranks` (None: of the job). Raises SilentPeer when that times out.

    An error stays as it is in a job whose ranks do not beat. On CUDA no host waits so: NCCL's watchdog does.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, SilentPeer) or not has_timed_out(error) or not dist.is_initialized():
            raise
        awaited = ranks if isinstance(ranks, Sequence) else dist.get_process_group_ranks(ranks or dist.group.WORLD)
        line = _of_this_job(lambda own: own.line_of([rank for rank in awaited if rank != dist.get_rank()], what))
        if line is None:
            raise
        raise SilentPeer(line) from None


def wait_for(works: Iterable[dist.Work], group: dist.ProcessGroup | None, what: str, device: torch.device) -> None:
    """Wait for `works` of `group` on tensors of `device`, for no longer than the job's timeout. Raises SilentPeer.

    A framework's groups may have other timeouts: torch's default is half an hour for each, whatever the job's is.
    """
    with hearing(group, what):
        for work in works:
            if device.type == "cpu":
                work.wait(job_timeout())
            else:
                work.wait()  # with a timeout, the host would wait


def silent_peer(error: BaseException) -> SilentPeer | None:
    """Return what to say in the place of `error`, if a wait has timed out and a rank of the job is silent."""
    if isinstance(error, SilentPeer) or not isinstance(error, RuntimeError) or not has_timed_out(error):
        return None
    line = _of_this_job(Silence.anywhere) if dist.is_initialized() else None
    return None if line is None else SilentPeer(line)


def _of_this_job(ask: Callable[[Silence], str | None]) -> str | None:
    """Ask without a heartbeat at hand; None where this rank has none, or the store does not answer."""
    rank, timeout = dist.get_rank(), job_timeout()

    def found() -> str | None:
        shared = PrefixStore(_PREFIX, _get_default_store())
        store = apart(shared) or shared
        return ask(Silence(store, rank, (), timeout)) if beats_of(store, [rank]) else None

    try:
        return answered(found, _LONGEST_SEARCH_SECONDS)
    except (RuntimeError, Unanswered):
        return None


_TOLD_AFTER: Final = 16  # beats without which a watched process is told of, before the timeout ends those that wait
_LAST_BEAT_SECONDS: Final = 1.0


@dataclass
class _Life:
    """State of a heartbeat and its thread. The thread must not hold the heartbeat, with whose end it ends."""

    awaited: int | None = None
    stage: int | None = None
    failed: bool = False
    watched: dict[int, str] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def ends_well(self) -> bool:
        """Return whether nobody should wait for this process any more, where it has ended."""
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
        shared = PrefixStore(_PREFIX, _get_default_store())
        own = apart(shared)
        self._store = shared if own is None else own
        self._silence = Silence(self._store, self._rank, ranks, timeout)
        if own is not None:
            self.start()

    def start(self) -> None:
        """Beat from here on, until `stop`, the end of this object, or that of the interpreter."""
        if self._thread is None:
            beats = (self._store, self._rank, self._life, self._seconds / _BEATS)
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
    reported = False
    while True:
        try:
            Beat(time.time(), life.awaited, stage=life.stage).write(store, rank)
            if life.watched:
                _look_after(life.watched, store, _TOLD_AFTER * seconds)
        except Exception as error:
            # Where this process has no more to do in the job, it may be the first to have ended.
            if life.watched and not reported and not life.ended.is_set() and dist.is_initialized():
                _say(f"{_UNANSWERED}; one that is silent will not be named")
                reported = True
            if not isinstance(error, Unanswered):
                return
        if life.ended.wait(seconds):
            break
    if life.ends_well:
        with suppress(Exception):  # of the store, which may have ended
            Beat(time.time(), closed=True, stage=life.stage).write(store, rank)


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
