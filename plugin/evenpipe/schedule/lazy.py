"""Values of each stage that are made when they are first asked for: of large pipelines, few ever are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, overload

__all__ = ["PerStage"]

T = TypeVar("T")


class PerStage(Sequence[T]):
    """``make(stage)`` for each of so many stages; equal to any sequence of equal values."""

    def __init__(self, stages: int, make: Callable[[int], T]) -> None:
        self._numbers = range(stages)
        self._make = make
        self._made: dict[int, T] = {}

    @overload
    def __getitem__(self, at: int) -> T: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[T]: ...

    def __getitem__(self, at: int | slice) -> T | Sequence[T]:
        if isinstance(at, slice):
            return [self[stage] for stage in self._numbers[at]]
        stage = self._numbers[at]
        if stage not in self._made:
            self._made[stage] = self._make(stage)
        return self._made[stage]

    def __len__(self) -> int:
        return len(self._numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
