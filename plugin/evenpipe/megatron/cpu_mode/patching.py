"""What every patch of CPU mode has in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from evenpipe.megatron.supported import MEGATRON_CORE, RELEASES
from evenpipe.upstream import ANY, Distribution, Patch

__all__ = ["no_gpu", "patch"]

_TORCH = Distribution("torch")


def patch(
    target: str, replacement: Callable[[Any], Any], reason: str, signature: str | Mapping[str, str], *bindings: str
) -> Patch:
    """A patch named after its target.

    One signature holds for every supported series of megatron-core, or for any torch; a mapping gives it per series.
    """
    core = target.startswith("megatron.")
    if isinstance(signature, str):
        signature = dict.fromkeys(RELEASES if core else (ANY,), signature)
    distribution = MEGATRON_CORE if core else _TORCH
    return Patch(target.partition(":")[2], (target, *bindings), distribution, signature, replacement, reason)


def no_gpu() -> str | None:
    """Guard of CPU mode's patches: why they must not be applied in this process, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    return "CUDA is available here: CPU mode is for machines without a GPU: leave it off, or set CUDA_VISIBLE_DEVICES="
