"""Where a stage stands still, and what for: read off when its actions, and its neighbours', started and ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, Final, Literal, NamedTuple

from evenpipe.schedule import COMPUTE, KINDS, LOAD, UPDATE, Action, Places
from evenpipe.simulate import Span

__all__ = ["Reason", "Wait", "Waits", "waits_in"]

Reason = Literal["start", "forward", "backward", "transfer", "itself", "end"]
_BUSY: Final = COMPUTE | {UPDATE}
#: Shorter ones are not told: clocks and function calls take as long.
_LEAST_MS: Final = 1e-3
_Key = tuple[int, str, Action]


class Wait(NamedTuple):
    """All waits of one stage for one thing, in a batch.

    reason: "start" and "end": before its first and after its last action; "forward" and "backward": for a message from
    ``source``; "transfer": for what its partner keeps; "itself": for nothing that came from elsewhere. total_ms: of
    them all, of which message_ms passed when what was waited for had been computed. times: how many; longest_ms: one.
    """

    stage: int
    reason: Reason
    source: int | None
    total_ms: float
    message_ms: float
    times: int
    longest_ms: float

    def to_json(self) -> dict[str, Any]:
        """As documents have it."""
        return self._asdict()


class Waits(NamedTuple):
    """All that stages wait for; message_ms: by (reason, source, target), what a message takes that was waited for."""

    batch_ms: float
    stages: tuple[Wait, ...]
    message_ms: dict[tuple[Reason, int, int], float]

    def share(self, wait: Wait) -> float:
        """The part of the batch that the stage spends so."""
        return wait.total_ms / self.batch_ms if self.batch_ms else 0.0


class _Gap(NamedTuple):
    """A stage did nothing from ``start_ms`` on, until the start of an action that takes from ``source``."""

    stage: int
    action: Action
    start_ms: float
    end_ms: float
    reason: Reason | None
    source: int | None
    ready_ms: float | None
    moved_ms: float | None


def waits_in(places: Places, stages: Sequence[Sequence[Span]]) -> Waits:
    """What each stage waits for; ``stages`` has the spans of a batch, measured or simulated, from a common start.

    A gap before an action belongs to what came last of all that it needs: the message of its neighbour, or what its
    partner keeps of its micro-batch; to the stage itself, if all of that had long been there. How long messages take is
    the median over those that were certainly waited for, the receiver having been idle before they were sent.
    """
    batch_ms = max((span.end_ms for spans in stages for span in spans), default=0.0)
    gaps = list(_gaps(places, stages))
    message_ms = _messages(gaps)
    found: dict[tuple[int, Reason, int | None], list[tuple[float, float]]] = defaultdict(list)
    for gap in gaps:
        reason, source, message = _blamed(gap, message_ms)
        found[gap.stage, reason, source].append((gap.end_ms - gap.start_ms, message))
    for stage, spans in enumerate(stages):
        busy = [span for span in spans if span.action.kind in _BUSY]
        if busy:
            found[stage, "start", None].append((min(span.start_ms for span in busy), 0.0))
            found[stage, "end", None].append((batch_ms - max(span.end_ms for span in busy), 0.0))
    waits = (
        Wait(*key, sum(ms for ms, _ in each), sum(ms for _, ms in each), len(each), max(ms for ms, _ in each))
        for key, each in found.items()
    )
    told = sorted((wait for wait in waits if wait.total_ms > _LEAST_MS), key=lambda wait: (wait.stage, -wait.total_ms))
    return Waits(batch_ms, tuple(told), message_ms)


def _gaps(places: Places, stages: Sequence[Sequence[Span]]) -> Iterator[_Gap]:
    ends = _ends(stages)
    for stage, spans in enumerate(stages):
        loads = {span.action.unit: span.end_ms for span in spans if span.action.kind == LOAD}
        before: float | None = None
        for action, start_ms, end_ms in sorted(spans, key=lambda span: span.start_ms):
            if action.kind not in _BUSY:
                continue
            if before is not None and start_ms - before > _LEAST_MS:
                reason, source, ready = _input(places, stage, action, ends)
                moved = loads.get(action.unit) if KINDS[action.kind].direction < 0 else None
                yield _Gap(stage, action, before, start_ms, reason, source, ready, moved)
            before = end_ms if before is None else max(before, end_ms)


def _ends(stages: Iterable[Sequence[Span]]) -> dict[_Key, float]:
    """When results that neighbours take were there, by (stage, "forward" or "backward", a forward of the unit)."""
    return {
        (stage, _direction(action), Action("F", *action.unit)): end_ms
        for stage, spans in enumerate(stages)
        for action, _, end_ms in spans
        if KINDS[action.kind].direction
    }


def _direction(action: Action) -> Reason:
    return "forward" if KINDS[action.kind].direction > 0 else "backward"


def _input(
    places: Places, stage: int, action: Action, ends: dict[_Key, float]
) -> tuple[Reason | None, int | None, float | None]:
    """From which stage an action takes its input, and when that was computed."""
    direction = KINDS[action.kind].direction
    sender = places.neighbour(stage, action.chunk, -direction) if direction else None
    if sender is None or sender.stage == stage:
        return None, None, None
    reason = _direction(action)
    ready = ends.get((sender.stage, reason, Action("F", action.micro_batch, sender.chunk)))
    return reason, sender.stage, ready


def _messages(gaps: Iterable[_Gap]) -> dict[tuple[Reason, int, int], float]:
    taken: dict[tuple[Reason, int, int], list[float]] = defaultdict(list)
    for gap in gaps:
        waited = gap.ready_ms is not None and gap.start_ms <= gap.ready_ms <= gap.end_ms
        transferred = gap.moved_ms is not None and gap.ready_ms is not None and gap.moved_ms > gap.ready_ms
        if waited and not transferred and gap.reason is not None and gap.source is not None:
            taken[gap.reason, gap.source, gap.stage].append(gap.end_ms - (gap.ready_ms or 0.0))
    return {link: median(times) for link, times in taken.items()}


def _blamed(gap: _Gap, message_ms: dict[tuple[Reason, int, int], float]) -> tuple[Reason, int | None, float]:
    """What a gap is for: reason, source, and how much of it passed with a message under way."""
    if gap.moved_ms is not None and gap.start_ms < gap.moved_ms <= gap.end_ms and gap.moved_ms > (gap.ready_ms or 0.0):
        return "transfer", None, 0.0
    if gap.reason is None or gap.source is None or gap.ready_ms is None:
        return "itself", None, 0.0
    if gap.ready_ms >= gap.start_ms:
        return gap.reason, gap.source, max(0.0, gap.end_ms - gap.ready_ms)
    arrived = gap.ready_ms + message_ms.get((gap.reason, gap.source, gap.stage), 0.0)
    if arrived - gap.start_ms > (gap.end_ms - gap.start_ms) / 2:
        return gap.reason, gap.source, gap.end_ms - gap.start_ms
    return "itself", None, 0.0
