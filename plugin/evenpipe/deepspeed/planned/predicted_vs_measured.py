"""What a plan predicted of each stage's time and memory, beside what the run measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evenpipe.deepspeed.static_memory import static_bytes
from evenpipe.partition.search.plan import Plan
from evenpipe.runtime.resources import StageFigures, highest_of_all
from evenpipe.stage_code import compare_with_plan

__all__ = ["PlanComparison"]


class PlanComparison:
    """The comparison of `engine` with `plan`, whose stages it has.

    All ranks make it, when model and optimizer are there.
    """

    def __init__(self, engine: Any, plan: Plan) -> None:
        self._plan = plan
        mine = static_bytes(engine)
        table = [mine if stage == engine.stage_id else 0 for stage in range(engine.num_stages)]
        self._static_bytes = [int(nbytes) for nbytes in highest_of_all(table, engine.device)]

    def lines(self, stages: Sequence[StageFigures]) -> list[str]:
        """Return a line a stage, of a batch that was measured."""
        held = zip(stages, self._static_bytes, strict=True)
        return compare_with_plan(self._plan, [one._replace(peak_bytes=one.peak_bytes + static) for one, static in held])
