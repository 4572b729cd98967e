"""What the benchmark of peers asks of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from emulation import Accelerator

from peer_engines.part import Live, Setting

__all__ = ["Bench", "Peer", "Ran", "twice_as_many"]


class Bench(NamedTuple):
    """What this process runs a setting with."""

    setting: Setting
    rank: int
    accelerator: Accelerator
    live: Live


class Ran(ABC):
    """A pipeline that is ready to train."""

    #: Batches that a turn carries out before and after the one that is measured: where they run into each other, one.
    around = 0

    def __init__(self, live: Live) -> None:
        self.live = live

    @abstractmethod
    def batch(self) -> None:
        """Train one."""

    def peak_bytes(self) -> int:
        """The most that this stage has held of what parts save since `live` was reset."""
        return self.live.peak

    def rest(self) -> None:  # noqa: B027 - most engines end a batch with nothing under way
        """Before another engine's turn: end whatever is under way between stages."""

    def close(self) -> None:  # noqa: B027 - and hold nothing that outlives them
        """Let go of what the engine holds."""


class Peer(NamedTuple):
    """An engine's schedule. `why_not` says where there is none; `delayed`: its gradients are a batch late.

    `prepare` is called once for a setting, before there are processes.
    """

    engine: str
    schedule: str
    make: Callable[[Bench], Ran]
    why_not: Callable[[Setting], str | None] = lambda setting: None
    delayed: bool = False
    prepare: Callable[[Setting], object] = lambda setting: None

    @property
    def name(self) -> str:
        """For people, and the document."""
        return f"{self.engine}: {self.schedule}"


def twice_as_many(setting: Setting) -> str | None:
    """Why there is no DualPipeV; None where there is."""
    few = setting.micro_batches < 2 * setting.stages
    return "DualPipeV needs at least 2p micro-batches" if few else None
