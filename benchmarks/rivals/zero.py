"""ZeRO: replicas that share optimizer state and gradients (stage 2), and parameters too (stage 3); no pipeline."""

from __future__ import annotations

from rivals.layers import Layers

__all__ = ["zero_fits"]


def zero_fits(layers: Layers, replicas: int, limit_bytes: int, stage: int) -> bool:
    """Whether each of the replicas can train a batch of the profile's size.

    Under stage 3 the parameters of two layers are whole at a time: one that computes, and the next, which is gathered.
    """
    whole = layers.span(0, layers.count)
    beside = whole.static - whole.weights
    if stage == 2:
        held = whole.weights + beside / replicas
    else:
        largest = max(layers.span(layer, layer + 1).weights for layer in range(layers.count))
        held = (whole.weights + beside) / replicas + 2 * largest
    return held + whole.saved <= limit_bytes
