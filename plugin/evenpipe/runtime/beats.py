"""Signs of life, kept in the store in which a job's ranks found each other, under `PREFIX`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from threading import Thread
from typing import Final, NamedTuple, TypeVar, cast

from torch._C._distributed_c10d import Store

__all__ = ["ANSWER_SECONDS", "PREFIX", "Beat", "answered", "apart", "beats_of", "present"]

PREFIX: Final = "evenpipe/heartbeat/"
ANSWER_SECONDS: Final = 5.0  # within which a store answers, unless the process that keeps it stands still

T = TypeVar("T")


class Beat(NamedTuple):
    """When a process was last heard of, in seconds since 1970, and the rank that it was waiting for.

    Clocks of hosts are taken to agree within some beats, as NTP has them. `closed`: no further beat is to be expected.
    `stage`: of its pipeline.
    """

    at: float
    awaited: int | None = None
    closed: bool = False
    stage: int | None = None

    def tell(self, store: Store, rank: int) -> None:
        """Have it stand in `store` for that `rank`."""
        store.set(str(rank), json.dumps(self))


def beats_of(store: Store, ranks: Iterable[int]) -> dict[int, Beat]:
    """The last beat of each of `ranks` that has beaten, in few round trips, however many they are."""
    keys = present(store, [str(rank) for rank in ranks])
    return {int(key): Beat(*json.loads(beat)) for key, beat in zip(keys, store.multi_get(keys), strict=True)}


def present(store: Store, keys: list[str]) -> list[str]:
    """Those of `keys` that `store` has, which says only whether it has all that it is asked for: few may be missing."""
    if not keys or store.check(keys):
        return keys
    if len(keys) == 1:
        return []
    half = len(keys) // 2
    return [*present(store, keys[:half]), *present(store, keys[half:])]


def apart(store: Store) -> Store | None:
    """The same store over a connection of its own, as a TCPStore's is held up by whoever waits in it; None without one.

    Before torch 2.8 stores have no `clone`, and those that are written in Python may lack it.
    """
    try:
        return cast(Store, store.clone())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return None


def answered(ask: Callable[[], T], seconds: float = ANSWER_SECONDS) -> T:
    """What `ask` returns or raises; concurrent.futures.TimeoutError where it takes longer, as a store may for ever."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    Thread(target=run, name="evenpipe-asking", daemon=True).start()
    return answer.result(seconds)
