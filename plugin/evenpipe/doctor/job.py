"""The ranks of a job: they find each other, tell each other what they found, and name those that are missing."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

__all__ = ["Job", "Launched", "NoMeetingError", "meet"]

_POLL_SECONDS = 0.05


class NoMeetingError(Exception):
    """The ranks of a job cannot find each other: why, and what to do."""

    def __init__(self, said: str, remedy: str) -> None:
        super().__init__(said)
        self.remedy = remedy


class Launched(NamedTuple):
    """A process as its launcher describes it: torchrun, DeepSpeed's, or variables set by hand."""

    rank: int
    world: int
    node: str
    host: str
    local_rank: int
    per_node: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Launched:
        """Return a job of one where nothing is said. Raises ValueError for a variable that is no number, naming it."""
        host = socket.gethostname()

        def number(name: str, default: int) -> int:
            said = environ.get(name, str(default))
            if not said.isdecimal():
                raise ValueError(f"{name}={said} is no number: start the ranks with torchrun, or set what it sets")
            return int(said)

        rank, world = number("RANK", 0), number("WORLD_SIZE", 1)
        if rank >= world:
            raise ValueError(f"RANK={rank} is not below WORLD_SIZE={world}: ranks count from 0")
        per_node = number("LOCAL_WORLD_SIZE", world)
        return cls(rank, world, environ.get("GROUP_RANK", host), host, number("LOCAL_RANK", rank % per_node), per_node)


class Job:
    """The ranks that are here, by what their launcher says of them; ``missing`` are those that are not."""

    def __init__(self, store: Any, launched: Launched, seconds: float) -> None:
        self._store = store
        self._launched = launched
        self._seconds = seconds
        store.set(f"here/{launched.rank}", json.dumps(launched))
        found = self._await("here", range(launched.world), seconds)
        self.present: dict[int, Launched] = {rank: Launched(*said) for rank, said in found.items()}
        self.missing = [rank for rank in range(launched.world) if rank not in self.present]

    @property
    def reports(self) -> bool:
        """Return whether this rank, the lowest that is present, is the one that reports for all."""
        return self._launched.rank == min(self.present)

    def agree(self) -> bool:
        """Return whether all ranks have seen all others: what they then do together, they all do."""
        self._store.set(f"complete/{self._launched.rank}", json.dumps(not self.missing))
        found = self._await("complete", range(self._launched.world), self._seconds)
        return len(found) == self._launched.world and all(found.values())

    def gather(self, what: str, value: Any, seconds: float) -> dict[int, Any]:
        """On the rank that reports: the values of all ranks that gave one in time. Elsewhere: nothing."""
        self._store.set(f"{what}/{self._launched.rank}", json.dumps(value))
        return self._await(what, sorted(self.present), seconds) if self.reports else {}

    def end(self, seconds: float) -> None:
        """Return when the report has been printed: whoever ends before has torchrun end the others."""
        if self.reports:
            self._store.set("printed", "1")
            # Whoever holds the store goes last, or the others find it gone.
            self._await("gone", [rank for rank in self.present if rank != self._launched.rank], 2.0)
        else:
            try:
                self._store.wait(["printed"], timedelta(seconds=seconds))
                self._store.set(f"gone/{self._launched.rank}", "1")
            except RuntimeError:
                return

    def _await(self, what: str, ranks: Any, seconds: float) -> dict[int, Any]:
        found: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while True:
            for rank in ranks:
                if rank not in found and self._store.check([f"{what}/{rank}"]):
                    found[rank] = json.loads(self._store.get(f"{what}/{rank}"))
            if len(found) == len(ranks) or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_SECONDS)


def meet(environ: Mapping[str, str], launched: Launched, seconds: float, purpose: str = "doctor") -> Any:
    """Return a connection to the job's store, which torchrun's agent holds, or else rank 0. Raises NoMeetingError."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if host is None or port is None:
        name = "MASTER_ADDR" if host is None else "MASTER_PORT"
        raise NoMeetingError(f"{name} is not set, and WORLD_SIZE is {launched.world}", "start the ranks with torchrun")
    held_by_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holds = launched.rank == 0 and not held_by_agent and purpose == "doctor"
    try:
        store = TCPStore(host, int(port), None, holds, timeout=timedelta(seconds=seconds), wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        whose = "rank 0 cannot listen" if holds else "nobody answers"
        said = " ".join(str(error).split())[:160]
        raise NoMeetingError(
            f"rank {launched.rank}: {whose} at MASTER_ADDR:MASTER_PORT {host}:{port} within {seconds:g} s ({said})",
            "see that rank 0 is started, that the address is its own, and that no firewall is between",
        ) from None
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"evenpipe/doctor/{attempt}/{purpose}", store)
