"""What became of the optimizer steps, filed under the iterations that they belong to."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Outcomes"]


class _Outcome(NamedTuple):
    updated: bool
    grad_norm: float | None


class Outcomes:
    """Steps by iteration, in whatever order they are told, once or more often."""

    def __init__(self) -> None:
        self._outcomes: dict[int, _Outcome] = {}

    def file(self, iteration: int, updated: bool, grad_norm: float | None) -> None:
        """The step of that iteration has been made, or skipped."""
        self._outcomes[iteration] = _Outcome(updated, grad_norm)

    @property
    def grad_norms(self) -> tuple[float | None, ...]:
        """By iteration; None where the step was skipped."""
        return tuple(step.grad_norm if step.updated else None for _, step in sorted(self._outcomes.items()))

    @property
    def skipped(self) -> tuple[int, ...]:
        """The iterations whose step was skipped."""
        return tuple(iteration for iteration, step in sorted(self._outcomes.items()) if not step.updated)
