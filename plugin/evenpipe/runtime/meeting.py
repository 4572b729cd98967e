"""Ranks tell each other how they were started, before torch.distributed is: who differs, or does not come, is named."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

__all__ = ["Meeting", "NotMet", "meeting_of"]

_NAMED_AFTER_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.05
_READ_SECONDS: Final = 5.0


class NotMet(RuntimeError):
    """The ranks cannot train together; the message is one line, for the user."""


def meeting_of(environ: Mapping[str, str]) -> Meeting:
    """Return the meeting of the job that `environ` is a rank of. Raises NotMet without an address."""
    world, rank = int(environ.get("WORLD_SIZE", "1")), int(environ.get("RANK", "0"))
    if world > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        raise NotMet("MASTER_ADDR or MASTER_PORT is not set: start the ranks with torchrun")
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Meeting(world, rank, environ, f"evenpipe/started/{attempt}/")


class Meeting:
    """One rank's side of it. The store is that of torchrun's agent, or else is held by rank 0."""

    def __init__(self, world: int, rank: int, environ: Mapping[str, str], prefix: str) -> None:
        self._world, self._rank = world, rank
        self._address = environ.get("MASTER_ADDR", ""), int(environ.get("MASTER_PORT") or 0)
        self._of_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._prefix = prefix

    def tell(self, row: Mapping[str, str] | None) -> None:
        """Say how this rank was started (None: it does not take part), and wait for nobody.

        Rank 0 says nothing where it would have to hold the store.
        """
        if self._world > 1 and (self._of_agent or self._rank != 0):
            self._say(self._store(timedelta(seconds=_NAMED_AFTER_SECONDS)), row)

    def agree(self, row: Mapping[str, str], timeout: timedelta, warn: Callable[[str], None]) -> Store | None:
        """Return the store when all ranks were started with the same `row`; None for a single rank.

        Keep it until torch.distributed is started: that takes it over where rank 0 holds it. Rank 0 compares; who has
        not come after 20 s is `warn`ed of. Raises NotMet, in one line, with the first rank that differs, takes no part,
        or has not come within `timeout`.
        """
        if self._world == 1:
            return None
        store = self._store(timeout)
        self._say(store, row)
        started = time.monotonic()
        deadline = started + timeout.total_seconds()
        if self._rank != 0:
            wrong = self._verdict(store, timeout.total_seconds(), warn)
        else:
            wrong = self._difference(store, row, deadline, warn)
            store.set("verdict", wrong)
            while wrong and store.add("read", 0) < self._world - 1 and time.monotonic() < started + _READ_SECONDS:
                time.sleep(_POLL_SECONDS)  # the store may end with this process
        if wrong:
            raise NotMet(wrong)
        return store

    def _store(self, timeout: timedelta) -> Store:
        holds = self._rank == 0 and not self._of_agent
        try:
            store = TCPStore(*self._address, None, holds, timeout=timeout, wait_for_workers=False, multi_tenant=holds)
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:160]
            raise NotMet(f"rank {self._rank} meets nobody at {':'.join(map(str, self._address))} ({reason})") from None
        return PrefixStore(self._prefix, store)

    def _say(self, store: Store, row: Mapping[str, str] | None) -> None:
        store.set(f"row/{self._rank}", json.dumps([socket.gethostname(), row]))

    def _verdict(self, store: Store, seconds: float, warn: Callable[[str], None]) -> str:
        """Return what rank 0 has found, or what is wrong with rank 0."""
        named_at, deadline, rank_0_came = time.monotonic() + _NAMED_AFTER_SECONDS, time.monotonic() + seconds, False
        try:
            while not store.check(["verdict"]):
                now = time.monotonic()
                if not rank_0_came and (rank_0_came := store.check(["row/0"])):
                    host, first = json.loads(store.get("row/0"))
                    if first is None:
                        return f"rank 0 ({host}) {_WITHOUT}"
                    deadline = now + seconds + _READ_SECONDS  # rank 0 waits for others from now on
                if now > deadline:
                    return f"rank 0 {_ABSENT}"
                if not rank_0_came and now > named_at:
                    warn(f"rank 0 {_ABSENT}; rank {self._rank} waits")
                    named_at = deadline
                time.sleep(_POLL_SECONDS)
            wrong = store.get("verdict").decode()
            store.add("read", 1)
        except RuntimeError as error:
            return f"rank 0 has ended before all ranks had told how they were started ({str(error).splitlines()[0]})"
        return wrong

    def _difference(
        self, store: Store, expected: Mapping[str, str], deadline: float, warn: Callable[[str], None]
    ) -> str:
        """Return what is wrong with the first rank that something is wrong with; nothing if all are alike."""
        missing, named_at = set(range(1, self._world)), time.monotonic() + _NAMED_AFTER_SECONDS
        while missing:
            for rank in sorted(missing):
                if not store.check([f"row/{rank}"]):
                    continue
                missing.discard(rank)
                host, row = json.loads(store.get(f"row/{rank}"))
                if row is None:
                    return f"rank {rank} ({host}) {_WITHOUT}"
                if differing := _differing(expected, row):
                    return f"rank {rank} ({host}) was started differently from rank 0 ({socket.gethostname()}): " + (
                        f"{differing}; start all ranks alike"
                    )
            if not missing:
                break
            now = time.monotonic()
            if now > deadline:
                return f"{_ranks(missing)} {_ABSENT}"
            if now > named_at:
                warn(f"{_ranks(missing)} {_ABSENT}; waiting")
                named_at = deadline
            time.sleep(_POLL_SECONDS)
        return ""


_WITHOUT: Final = "was started without EvenPipe's flags, which other ranks have: start all ranks alike"
_ABSENT: Final = (
    "has not come to tell how it was started: look after its process and its host, and see that its script imports "
    "EvenPipe as other ranks' do"
)


def _differing(expected: Mapping[str, str], row: Mapping[str, str]) -> str:
    names = [name for name in {**expected, **row} if expected.get(name) != row.get(name)]
    return ", ".join(f"{name} {row.get(name, 'unknown')} instead of {expected.get(name, 'unknown')}" for name in names)


def _ranks(ranks: Iterable[int]) -> str:
    first, *others = sorted(ranks)
    return f"rank {first}" + (f" (and {len(others)} more)" if others else "")
