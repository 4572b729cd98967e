"""What a run's schedule should take and hold, from what one micro-batch took and saved."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from evenpipe.megatron.trainer.result import RunResult
from evenpipe.schedule import BACKWARD, FORWARD, Kind, Schedule, lower
from evenpipe.simulate import Costs, Simulation, Span, simulate

__all__ = ["predict"]


def predict(plan: Schedule, result: RunResult) -> Simulation:
    """Simulate `plan` with every stage's median times and a micro-batch's bytes, as `result` has them; links are free.

    Times and bytes are those of single actions, so that how they add up over the schedule is the simulation's own.
    """
    costs = Costs(
        forward_ms=tuple(_through_the_stage(FORWARD, spans, plan.chunks) for spans in result.spans),
        backward_ms=tuple(_through_the_stage(BACKWARD, spans, plan.chunks) for spans in result.spans),
    )
    return simulate(lower(plan), costs, result.unit_bytes)


def _through_the_stage(kind: Kind, spans: Iterable[Span], chunks: int) -> float:
    return chunks * median(span.end_ms - span.start_ms for span in spans if span.action.kind == kind)
