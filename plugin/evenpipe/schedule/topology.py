"""Which stage talks to which: neighbours along the pipeline and BPipe's evictor-acceptor pairs."""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

from evenpipe.schedule.actions import FORWARD, Action

__all__ = ["Link", "LinkKind", "Message", "incoming", "outgoing", "partner"]

LinkKind = Literal["forward", "backward", "evict", "load"]


class Link(NamedTuple):
    """A directed first-in-first-out connection between two stages."""

    kind: LinkKind
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.kind} {self.source}→{self.target}"


_link = cache(Link)  # links are few and named by every message


class Message(NamedTuple):
    """What one link carries for one unit; ``chunk`` is the model chunk as the receiver names it."""

    link: Link
    micro_batch: int
    chunk: int


def partner(stage: int, stages: int) -> int:
    """The other stage of the evictor-acceptor pair (BPipe §3.2); the middle stage of an odd pipeline is its own."""
    return stages - 1 - stage


def outgoing(action: Action, stage: int, stages: int, chunks: int) -> Message | None:
    """What a forward or backward on ``stage`` sends.

    A forward goes to the next stage, and from the last stage to the next chunk on stage 0; a backward is its mirror
    image. None at either end of the model.
    """
    kind, micro_batch, chunk, _ = action
    if kind == FORWARD:
        if stage < stages - 1:
            return Message(_link("forward", stage, stage + 1), micro_batch, chunk)
        if chunk < chunks - 1:
            return Message(_link("forward", stage, 0), micro_batch, chunk + 1)
        return None
    if stage > 0:
        return Message(_link("backward", stage, stage - 1), micro_batch, chunk)
    if chunk > 0:
        return Message(_link("backward", stage, stages - 1), micro_batch, chunk - 1)
    return None


def incoming(action: Action, stage: int, stages: int, chunks: int) -> Message | None:
    """What a forward or backward on ``stage`` needs: the message whose sender's :func:`outgoing` is the same."""
    kind, micro_batch, chunk, _ = action
    if kind == FORWARD:
        if stage > 0:
            return Message(_link("forward", stage - 1, stage), micro_batch, chunk)
        return Message(_link("forward", stages - 1, stage), micro_batch, chunk) if chunk > 0 else None
    if stage < stages - 1:
        return Message(_link("backward", stage + 1, stage), micro_batch, chunk)
    return Message(_link("backward", 0, stage), micro_batch, chunk) if chunk < chunks - 1 else None
