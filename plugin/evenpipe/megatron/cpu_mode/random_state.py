"""CUDA's random state, which without CUDA is the CPU's."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from evenpipe.megatron.cpu_mode.patching import patch
from evenpipe.upstream import Patch

if TYPE_CHECKING:
    import torch

__all__ = ["random_patches"]


def random_patches() -> list[Patch]:
    """Every draw comes from the CPU's generator, and its state is what is kept and put back."""
    one_generator = "megatron-core keeps the CUDA random state; without CUDA every draw comes from the CPU's generator"
    random = "megatron.core.tensor_parallel.random"
    return [
        patch(
            "torch.cuda.random:manual_seed",
            lambda original: lambda seed: _seed(seed),
            one_generator,
            "(seed)",
            "torch.cuda:manual_seed",
        ),
        patch(
            "torch.cuda.random:get_rng_state",
            lambda original: lambda device="cuda": _state(),
            one_generator,
            "(device='cuda')",
            "torch.cuda:get_rng_state",
        ),
        patch(
            "torch.cuda.random:set_rng_state",
            lambda original: lambda new_state, device="cuda": _set_state(new_state),
            one_generator,
            "(new_state, device='cuda')",
            "torch.cuda:set_rng_state",
        ),
        patch(
            f"{random}:_set_cuda_rng_state",
            lambda original: lambda new_state, device=-1, graph_safe=False: _set_state(new_state),
            one_generator,
            "(new_state, device=-1, graph_safe=False)",
        ),
        patch(
            f"{random}:CudaRNGStatesTracker.fork",
            _without_warning,
            "megatron-core warns when a draw inside a fork moves the CPU's random state; here every draw does",
            "(self, name='model-parallel-rng')",
        ),
    ]


def _seed(seed: int) -> None:
    import torch

    torch.default_generator.manual_seed(int(seed))


def _state() -> torch.Tensor:
    import torch

    return torch.get_rng_state()


def _set_state(state: torch.Tensor) -> None:
    import torch

    torch.set_rng_state(state)


def _without_warning(original: Callable[..., Any]) -> Callable[..., Any]:
    """`fork` with the logger of its module switched off for its duration."""
    logger = logging.getLogger(original.__module__)

    @contextlib.contextmanager
    @functools.wraps(original)
    def fork(*args: Any, **kwargs: Any) -> Iterator[None]:
        before, logger.disabled = logger.disabled, True
        try:
            with original(*args, **kwargs):
                yield
        finally:
            logger.disabled = before

    return fork
