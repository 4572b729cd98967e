"""Megatron's random numbers, left as they were by what only a plugin has computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

__all__ = ["random_numbers_kept"]


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Afterwards random numbers go on as if nothing had been drawn."""
    tracked = get_cuda_rng_tracker().get_states()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    get_cuda_rng_tracker().set_states(tracked)
