"""What every stage holds at most in groups of k: the schedule's live micro-batches, weighed, and what stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evenpipe.planner.grouped import Candidate, GroupedSchedule

__all__ = ["StageMemory", "messages_at_once", "peak_bytes", "saved_peaks", "unit_bytes"]


class StageMemory(NamedTuple):
    """What one process of one stage holds, in bytes.

    ``static_bytes``: parameters, gradients and optimizer state. ``shared_bytes``: saved once, whatever the number of
    micro-batches (a causal mask). A micro-batch saves ``fixed_bytes``, and ``sample_bytes`` for each of its samples.
    ``message_bytes``: what travels between neighbours, one way, for a sample. ``workspace_bytes``: kept for a sample of
    the micro-batch that is being computed.
    """

    static_bytes: int
    shared_bytes: int
    fixed_bytes: int
    sample_bytes: int
    message_bytes: int
    workspace_bytes: int = 0


def unit_bytes(stage: StageMemory, micro_batch_size: int) -> int:
    """What one micro-batch of so many samples saves for its backward."""
    return stage.fixed_bytes + micro_batch_size * stage.sample_bytes


def peak_bytes(memory: Sequence[StageMemory], candidate: Candidate, schedule: GroupedSchedule) -> tuple[int, ...]:
    """Per stage, the most that one of its processes holds in a batch under ``candidate``.

    Saved activations at their peak, with what stays, and the messages that are under way beside them. What an operation
    takes only while it runs is not among it.
    """
    peaks = []
    for number, (stage, saved) in enumerate(zip(memory, saved_peaks(memory, candidate, schedule), strict=True)):
        messages = messages_at_once(len(memory), number, candidate)
        beside = candidate.b * (stage.workspace_bytes + messages * stage.message_bytes)
        peaks.append(stage.static_bytes + saved + beside)
    return tuple(peaks)


def saved_peaks(memory: Sequence[StageMemory], candidate: Candidate, schedule: GroupedSchedule) -> tuple[int, ...]:
    """Per stage, the most that one of its processes has saved for backwards in a batch under ``candidate``."""
    saved = schedule.saved_bytes([unit_bytes(stage, candidate.b) for stage in memory], candidate)
    return tuple(stage.shared_bytes + held for stage, held in zip(memory, saved, strict=True))


def messages_at_once(stages: int, stage: int, candidate: Candidate) -> int:
    """The most messages of a stage that are under way at once and are no saved activations.

    As the lowered program has it: the receives of this compute action and the next k are posted, and on each link the
    last k + 1 sends have not been waited for. A message received is a saved activation from its forward on.
    """
    neighbours = (stage > 0) + (stage < stages - 1)
    ahead = candidate.k + 1
    return min(ahead, neighbours * candidate.m) + neighbours * min(ahead, candidate.m)
