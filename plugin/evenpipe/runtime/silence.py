"""Which rank of a job is silent, where others have waited for it in vain: asked of the store in which ranks beat."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as Unanswered
from contextlib import contextmanager
from datetime import timedelta
from typing import ClassVar, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from evenpipe.runtime.beats import ANSWER_SECONDS, PREFIX, Beat, answered, apart, beats_of
from evenpipe.runtime.timeout import how_to_raise, job_timeout

__all__ = [
    "BEATS",
    "UNANSWERED",
    "Silence",
    "SilentPeer",
    "has_timed_out",
    "hearing",
    "remedy",
    "silent_peer",
    "wait_for",
]

#: In a timeout.
BEATS: Final = 20
#: Beats without which a process is taken for dead, once waits have timed out: hosts may be busy.
_DEAD_AFTER: Final = 5
#: Of ranks that live all the same, so many are named.
_MOST_NAMED: Final = 2
_LONGEST_SEARCH_SECONDS: Final = 3 * ANSWER_SECONDS
UNANSWERED: Final = "the host on which the ranks met does not answer"


class SilentPeer(RuntimeError):
    """Nothing came from a rank for as long as ranks may wait for each other. The message is one line, for the user."""

    one_line: ClassVar = True


class Silence:
    """What `rank`, whose pipeline is `ranks` by stage (none: not known), makes of a wait that took `timeout`."""

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
            name, said = self.name(self._rank), UNANSWERED
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
        """This rank's name, and who is silent, where it waits for `peers`."""
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
        earliest = time.time() - _DEAD_AFTER * self._seconds / BEATS
        return {rank for rank, beat in beats.items() if beat.closed or beat.at > earliest}

    def _end_of_waits(self, peer: int, beats: Mapping[int, Beat], alive: set[int]) -> int:
        """The one whom `peer` waits for, directly or not, and who waits for nobody, or is dead."""
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
        found = ranks if isinstance(ranks, Sequence) else dist.get_process_group_ranks(ranks or dist.group.WORLD)
        line = _of_this_job(lambda own: own.line_of([rank for rank in found if rank != dist.get_rank()], what))
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
    """What is found without a heartbeat at hand; None where this rank has none, or the store does not answer."""
    rank, timeout = dist.get_rank(), job_timeout()

    def found() -> str | None:
        shared = PrefixStore(PREFIX, _get_default_store())
        store = apart(shared) or shared
        return ask(Silence(store, rank, (), timeout)) if beats_of(store, [rank]) else None

    try:
        return answered(found, _LONGEST_SEARCH_SECONDS)
    except (RuntimeError, Unanswered):
        return None
