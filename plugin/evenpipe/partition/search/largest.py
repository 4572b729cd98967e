"""The largest micro-batch that fits: of ours, or of any other way to cut a model."""

from __future__ import annotations

from collections.abc import Callable

from evenpipe.partition.profile import Profile

__all__ = ["largest_batch"]

#: How many percent larger are asked for beyond what is the largest so far.
_BEYOND = (2, 5, 10)


def largest_batch(
    profile_at: Callable[[int], Profile], fits: Callable[[Profile], bool], *, step: int = 1, most: int = 1 << 16
) -> int:
    """The largest multiple of `step`, up to `most`, of whose profile `fits` holds; 0 if there is none.

    `profile_at` gives the profile of micro-batches of so many samples; `fits` cuts it in its own way, as
    `evenpipe.partition.search.finding.fits_into` does in ours. It is asked for twice as many each time, and then for
    halfway between what fits and what does not. What needs no memory optimisation and does not fit with some samples
    does not with more. With it a few may find no picks where more do: so some larger ones are asked for at the end, and
    if any fits, it goes on from there.
    """

    def holds(steps: int) -> bool:
        return steps * step <= most and fits(profile_at(steps * step))

    low, high = 0, 1
    while True:
        while holds(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        beyond = (low + 1 + low * more // 100 for more in _BEYOND)
        found = next((steps for steps in beyond if steps > low + 1 and holds(steps)), None)
        if found is None:
            return low * step
        low, high = found, 2 * found
