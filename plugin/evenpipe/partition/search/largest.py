"""The largest micro-batch that fits: of ours, or of any other way to cut a model."""

from __future__ import annotations

from collections.abc import Callable

from evenpipe.partition.profile import Profile

__all__ = ["largest_batch"]


def largest_batch(
    profile_at: Callable[[int], Profile], fits: Callable[[Profile], bool], *, step: int = 1, most: int = 1 << 16
) -> int:
    """The largest multiple of `step`, up to `most`, of whose profile `fits` holds; 0 if there is none.

    `profile_at` gives the profile of micro-batches of so many samples; `fits` cuts it in its own way, as
    `evenpipe.partition.search.plan.fits_into` does in ours. What does not fit with some samples does not with more: it
    is asked for twice as many each time, and then for halfway between what fits and what does not.
    """

    def holds(steps: int) -> bool:
        return fits(profile_at(steps * step))

    low, high = 0, 1
    while high * step <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most // step + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low * step
