"""Every rank's figures of an iteration, gathered while the next one runs."""

from __future__ import annotations

from evenpipe.megatron.script.two_buffered.exchange import exchange_among_all
from evenpipe.runtime.figures import StageFigures

__all__ = ["BackgroundFigures"]


class BackgroundFigures:
    """All ranks make one, and start and finish at the same iterations."""

    def __init__(self, stage: int, stages: int) -> None:
        self._stage = stage
        self._stages = stages
        self._iteration: int | None = None
        self._exchange = exchange_among_all(1 + len(StageFigures._fields))

    def start(self, iteration: int, figures: StageFigures) -> None:
        """Send this rank's; what was sent before has been fetched."""
        self._exchange.start([self._stage, *figures])
        self._iteration = iteration

    def finish(self) -> tuple[int, tuple[StageFigures, ...]] | None:
        """The iteration that was sent last, with the largest of each figure per stage; None where none was."""
        if self._iteration is None:
            return None
        rows, iteration, self._iteration = self._exchange.finish(), self._iteration, None
        of_stages = [
            [max(column) for column in zip(*(row[1:] for row in rows if int(row[0]) == stage), strict=True)]
            for stage in range(self._stages)
        ]
        return iteration, tuple(
            StageFigures(int(live), int(peak), int(evicted), exposed) for live, peak, evicted, exposed in of_stages
        )
