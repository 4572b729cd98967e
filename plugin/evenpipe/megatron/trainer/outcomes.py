"""What became of the optimizer steps, filed under the iterations that they belong to."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

__all__ = ["Extra", "Outcomes", "StepResult"]


class StepResult(Protocol):
    """A finished step of batch `batch`, counted from 0 since the model was made or loaded."""

    @property
    def batch(self) -> int: ...
    @property
    def updated(self) -> bool: ...
    @property
    def grad_norm(self) -> float | None: ...


class Extra(Protocol):
    """What a schedule keeps from iteration to iteration beyond model and optimizer, whose steps it may finish late.

    `finished` is the last finished step; bytes are of one process, beyond what it has without.
    """

    @property
    def finished(self) -> StepResult | None: ...
    @property
    def weight_version_bytes(self) -> int: ...
    @property
    def held_gradient_bytes(self) -> int: ...
    @property
    def versions_peak(self) -> int: ...

    def drain(self) -> None:
        """Finish the step under way, and let go of what has begun of the next batch."""

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on, once drained: tensors, numbers and plain containers."""

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over what `state_dict` gave; None: there is nothing but the weights, which have been loaded."""


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
