"""Cuts that send little, in place of those nearby that send more (DawnPiper Appendix B.2)."""

from __future__ import annotations

import numpy as np

from evenpipe.partition.search.costs import Costs, Numbers

__all__ = ["quiet"]

#: How far a cut may move, as a part of the mean time of a stage: so little that neither time nor memory shows it.
_NEAR = 0.01


def quiet(costs: Costs, positions: int) -> Numbers:
    """For each boundary, the one nearby that sends least over its cut; of several, the nearest.

    Where values of several nodes would be sent, that is behind the lowest leaf that they have in common. What crosses
    every cut nearby, as an embedding that all layers read, adds the same to each: it is disregarded, as it has to be.
    """
    near_ms = _NEAR * costs.upto_ms[-1] / positions
    lows = np.maximum(np.searchsorted(costs.upto_ms, costs.upto_ms - near_ms, "left"), 1)
    highs = np.minimum(np.searchsorted(costs.upto_ms, costs.upto_ms + near_ms, "right"), costs.last)
    moved = np.arange(costs.last + 1)
    for cut in range(1, costs.last):
        near = np.arange(lows[cut], highs[cut])
        volume = costs.cut_bytes[near]
        least = near[volume == volume.min()]
        moved[cut] = least[np.abs(least - cut).argmin()]
    return moved
