"""What the benchmark of peers asks of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from emulation import Accelerator

from peer_engines.part import Live, Setting

__all__ = ["Bench", "Peer", "Ran"]


class Bench(NamedTuple):
    """What this process runs a setting with."""

    setting: Setting
    rank: int
    accelerator: Accelerator
    live: Live


class Ran(Protocol):
    """A pipeline that is ready to train."""

    #: Batches that a turn carries out before those that are measured: where they run into each other, one.
    before: int

    def batch(self) -> None:
        """Train one."""

    def rest(self) -> None:
        """Before another engine's turn: end whatever is under way between stages."""

    def peak_bytes(self) -> int:
        """The most that this stage has held of what parts save since `live` was reset."""

    def close(self) -> None:
        """Let go of what the engine holds."""


class Peer(NamedTuple):
    """An engine's schedule. `why_not` says where there is none; `delayed`: its gradients are a batch late."""

    engine: str
    schedule: str
    make: Callable[[Bench], Ran]
    why_not: Callable[[Setting], str | None] = lambda setting: None
    delayed: bool = False

    @property
    def name(self) -> str:
        """For people, and the document."""
        return f"{self.engine}: {self.schedule}"
