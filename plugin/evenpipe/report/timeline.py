"""What can be drawn: the same two values come from a simulation and from a real run."""

from __future__ import annotations

from dataclasses import dataclass

from evenpipe.simulate import Simulation, Span

__all__ = ["StageMemory", "Timeline"]


@dataclass(frozen=True)
class Timeline:
    """One batch in time: per stage, the span of each of its actions, in milliseconds from a common start.

    With `names`, one for each row, a trace has rows of other things than the stages of one pipeline.
    """

    title: str
    stages: tuple[tuple[Span, ...], ...]
    names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, simulation: Simulation, title: str) -> Timeline:
        """A simulation's timeline."""
        return cls(title, simulation.timeline)

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
