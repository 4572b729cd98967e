"""2BW's weight versions as the paper states them, found again from nothing but the places of the updates."""

from __future__ import annotations

from collections.abc import Sequence

from evenpipe.schedule import Action


def rule(k: int, m: int) -> int:
    """max(⌊(k − 1)/m⌋ − 1, 0): the version of the k-th micro-batch of a stream, from 1 (PipeDream-2BW §3.1)."""
    return max((k - 1) // m - 1, 0)


def replay(row: Sequence[Action], m: int) -> dict[str, int]:
    """Keep two buffers as a stage does, written by updates only: the version that each compute action finds and uses.

    AssertionError where an update lacks a gradient or its weights, or a micro-batch its version.
    """
    buffers: list[int | None] = [0, None]
    backwarded: set[int] = set()
    used = {}
    for action in row:
        if action.kind == "U":
            batch = action.micro_batch
            assert set(range(batch * m, (batch + 1) * m)) <= backwarded, f"{action} has no gradient yet"
            assert buffers[batch % 2] == batch, f"{action} does not find W({batch})"
            buffers[(batch + 1) % 2] = batch + 1
        elif action.kind in "FB":
            version = rule(action.micro_batch + 1, m)
            assert version in buffers, f"{action} needs W({version}) and finds {buffers}"
            used[str(action)] = version
            if action.kind == "B":
                backwarded.add(action.micro_batch)
    return used
