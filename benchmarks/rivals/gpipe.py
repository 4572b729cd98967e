"""torchgpipe: layers cut for equal time (`balance_by_time`), m = p micro-batches forwarded before any backward."""

from __future__ import annotations

import itertools

from rivals.layers import Layers

__all__ = ["gpipe_fits"]


def gpipe_fits(layers: Layers, stages: int, limit_bytes: int, recompute: bool) -> bool:
    """Whether a micro-batch of the profile's size fits with as many of them as stages.

    With recomputation a stage keeps the inputs of all micro-batches and all that the last one saves: that is not
    forwarded again (`checkpoint="except_last"`, its default), and each of the others has the room that it leaves.
    """
    for ends in itertools.pairwise(layers.fastest(stages)):
        span = layers.span(*ends)
        held = stages * span.input + span.saved if recompute else stages * span.saved
        if span.static + held + span.messages > limit_bytes:
            return False
    return True
