"""The bytes that a stage holds when a share of what its micro-batches save is on the host, and the least such share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, TypeAlias

from evenpipe.schedule.actions import Action
from evenpipe.schedule.passes import whole_and_away

__all__ = ["Saved", "SwapRoom"]

#: By chunk, how many units are whole, or away.
_Counts: TypeAlias = tuple[tuple[int, int], ...]
#: Halvings after which a share is found as exactly as a byte of a terabyte.
_HALVINGS: Final = 40


@dataclass(frozen=True)
class Saved:
    """Bytes that micro-batches save in a chunk of a stage, and that stay until the batch ends or their backward.

    nbytes, staying: the most that one saves, and the most of it that cannot leave. first: what a batch's first one
    saves, which is more where others use it too, such as the tensor that all inputs are views of.
    """

    nbytes: float = 0.0
    staying: float = 0.0
    first: float = 0.0

    def with_unit(self, micro_batch: int, nbytes: float, staying: float) -> Saved:
        """Return the same after one more micro-batch."""
        if not micro_batch:
            return replace(self, first=max(self.first, nbytes))
        return replace(self, nbytes=max(self.nbytes, nbytes), staying=max(self.staying, staying))

    @property
    def once(self) -> float:
        """Return the bytes that a batch saves once."""
        return max(0.0, self.first - self.nbytes)

    def left(self, share: float) -> float:
        """Return the bytes that stay on the device when this share is to leave, or all that can."""
        return max(self.staying, (1.0 - share) * self.nbytes)


class SwapRoom:
    """Bytes of its own micro-batches that a stage holds; its actions evict nothing."""

    def __init__(self, row: Sequence[Action]) -> None:
        self._moments = _moments(tuple(row))

    def peak_bytes(self, saved: Mapping[int, Saved], share: float) -> float:
        """Return the most bytes held when this share of each micro-batch that swaps leaves; `saved` is by chunk."""
        once = sum(of_chunk.once for of_chunk in saved.values())
        return once + max(
            sum(count * saved[chunk].nbytes for chunk, count in whole)
            + sum(count * saved[chunk].left(share) for chunk, count in away)
            for whole, away in self._moments
        )

    def least_share(self, saved: Mapping[int, Saved], limit_bytes: float) -> float | None:
        """Return the smallest share with which the stage holds at most so many bytes; None where no share does."""
        if self.peak_bytes(saved, 0.0) <= limit_bytes:
            return 0.0
        if self.peak_bytes(saved, 1.0) > limit_bytes:
            return None
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.peak_bytes(saved, middle) <= limit_bytes else (middle, high)
        return high


@lru_cache(maxsize=64)
def _moments(row: tuple[Action, ...]) -> frozenset[tuple[_Counts, _Counts]]:
    """Return the different pairs of what is whole and what is away; a row of a run is asked for in every batch."""

    def counts(units: frozenset[tuple[int, int]]) -> _Counts:
        return tuple(sorted(Counter(chunk for _, chunk in units).items()))

    return frozenset((counts(whole), counts(away)) for whole, away in whole_and_away(row))
