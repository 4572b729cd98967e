"""What ``evenpipe train --partition`` says: time and memory of every stage, as planned and as measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from evenpipe.cli.partition_shown import division
from evenpipe.partition.search.plan import Plan
from evenpipe.report.figures import Division, draw_divisions
from evenpipe.train.options import TrainOptions
from evenpipe.train.predict import last_program, through_the_stages
from evenpipe.train.result import RunResult

__all__ = ["COMPARED", "Compared", "compared"]

#: The heads of :meth:`Compared.rows`.
COMPARED: Final = ("stage", "ms planned", "ms measured", "peak MiB planned", "peak MiB measured")

_GIB: Final = 2**30
_MIB: Final = 2**20


class Compared(NamedTuple):
    """One way beside the other."""

    plan: Plan
    planned: Division
    measured: Division

    def document(self) -> list[dict[str, Any]]:
        """Return every stage's figures for the JSON document; `_ms` is of a micro-batch, forward and backward."""
        rows = zip(
            self.planned.total_ms,
            self.measured.total_ms,
            self.planned.peak_bytes,
            self.measured.peak_bytes,
            strict=True,
        )
        names = ("planned_ms", "measured_ms", "planned_peak_bytes", "measured_peak_bytes")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def rows(self) -> Iterator[Sequence[str]]:
        """Yield a row a stage."""
        for stage, row in enumerate(self.document()):
            planned_ms, measured_ms, planned_bytes, measured_bytes = row.values()
            yield (
                str(stage),
                f"{planned_ms:,.4g}",
                f"{measured_ms:,.4g}",
                f"{planned_bytes / _MIB:,.2f}",
                f"{measured_bytes / _MIB:,.2f}",
            )

    def draw(self, path: Path, title: str) -> None:
        """A PNG of both. Raises OSError."""
        draw_divisions(path, title, [self.planned, self.measured], self.plan.limit_bytes / _GIB)


def compared(options: TrainOptions, result: RunResult) -> Compared:
    """Raises PartitionError where the plan has gone meanwhile."""
    assert options.partition is not None, "it is asked for where there is a plan"
    plan = Plan.read(Path(options.partition))
    forward_ms, backward_ms = [], []
    for costs in through_the_stages(last_program(options, result), result):
        halves = costs.get("input_gradient", 0.0) + costs.get("weight_gradient", 0.0)
        forward_ms.append(costs["forward"])
        backward_ms.append(max(costs.get("backward", 0.0), halves))
    held = [stage.held_bytes for stage in result.stages]
    # What is computed again, or waited for, is in the measured times of backwards.
    measured = Division("measured", forward_ms, backward_ms, [0.0] * len(held), held, held)
    return Compared(plan, division("planned", plan.stages), measured)
