"""What can be drawn: the same two values come from a simulation and from a real run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenpipe.schedule import Action, required_version
from evenpipe.simulate import Simulation, Span

__all__ = ["StageMemory", "Timeline"]


@dataclass(frozen=True)
class Timeline:
    """One batch, or a stream of them, in time: per stage, the span of each action, in milliseconds from a common start.

    With `names`, one for each row, a trace has rows of other things than the stages of one pipeline. `micro_batches`
    are those of one batch: they tell the batches of a stream, and so their weight versions, apart.
    """

    title: str
    stages: Sequence[tuple[Span, ...]]
    names: tuple[str, ...] | None = None
    micro_batches: int | None = None

    @classmethod
    def of(cls, simulation: Simulation, title: str, micro_batches: int | None = None) -> Timeline:
        """A simulation's timeline."""
        return cls(title, simulation.timeline, micro_batches=micro_batches)

    def version(self, action: Action) -> int:
        """The weight version that a forward or backward uses: 0 throughout, but in a stream of several batches."""
        return 0 if self.micro_batches is None else required_version(action.micro_batch // self.micro_batches)

    def name(self, row: int) -> str:
        """What a row is called."""
        return f"stage {row}" if self.names is None else self.names[row]

    @property
    def duration_ms(self) -> float:
        """When the last span ends."""
        return max((span.end_ms for spans in self.stages for span in spans), default=0.0)


@dataclass(frozen=True)
class StageMemory:
    """Peak per stage, as predicted and, after a real run, as measured; both in ``unit`` (e.g. "MiB", "live units")."""

    title: str
    unit: str
    predicted: tuple[float, ...]
    measured: tuple[float, ...] | None = None
