"""What a plan predicted of each stage's time and memory, beside what a run measured."""

from __future__ import annotations

from collections.abc import Sequence

from evenpipe.partition.search.plan import Plan
from evenpipe.report.predicted_vs_measured import Taken, comparison_lines
from evenpipe.runtime.resources import StageFigures

__all__ = ["compare_with_plan"]


def compare_with_plan(plan: Plan, figures: Sequence[StageFigures]) -> list[str]:
    """A line a stage. `figures` are of one batch of the plan's; their `peak_bytes` are to be all that a stage holds.

    Stages with several parts take the time of all of them; their peaks are of the whole stage.
    """
    of_stage = [[part for part in plan.stages if part.stage == stage] for stage in range(plan.stage_count)]
    names = ["nodes " + ", ".join(f"{part.first_node}–{part.last_node}" for part in parts) for parts in of_stage]
    predicted = [
        Taken(sum(part.forward_ms + part.backward_ms + part.extra_ms for part in parts), parts[0].peak_bytes)
        for parts in of_stage
    ]
    measured = [Taken(one.computed_ms / plan.micro_batches, one.peak_bytes) for one in figures]
    return comparison_lines(names, predicted, measured)
