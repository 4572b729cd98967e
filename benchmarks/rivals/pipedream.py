"""PipeDream: layers cut for equal time; stage x of ℓ keeps ℓ − x + 1 copies of activations and weights."""

from __future__ import annotations

import itertools

from rivals.layers import Layers

__all__ = ["pipedream_fits"]


def pipedream_fits(layers: Layers, stages: int, limit_bytes: int) -> bool:
    """Whether a micro-batch of the profile's size can be trained on `stages` devices (1F1B, asynchronous)."""
    for stage, ends in enumerate(itertools.pairwise(layers.fastest(stages))):
        span, copies = layers.span(*ends), stages - stage
        if span.static + (copies - 1) * span.weights + copies * span.saved + span.messages > limit_bytes:
            return False
    return True
