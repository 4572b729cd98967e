"""How much a rank holds of a batch's gradients while they wait for their step and the next ones are added up."""

from __future__ import annotations

__all__ = ["held_gradient_bytes"]


def held_gradient_bytes(numbers: int, element_bytes: int, replicas: int) -> int:
    """g · N / d bytes, on a stage whose steps wait: the gradients that the rank's own optimizer steps with.

    `numbers` N is what the stage's gradient buffers have room for, padding included, `element_bytes` g what one of them
    takes, and `replicas` d among how many the optimizer's state is dealt out (the distributed optimizer, ZeRO-1): 1
    where each has all of it. Buffers with other replicas, as of experts, count apart. Raises ValueError where the
    buffers cannot be dealt out evenly.
    """
    if numbers % replicas:
        raise ValueError(f"{numbers} gradients cannot be dealt out evenly to {replicas} replicas")
    return numbers // replicas * element_bytes
