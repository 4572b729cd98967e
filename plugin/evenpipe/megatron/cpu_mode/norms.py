"""Layer norms under sequence parallelism without Apex and Transformer Engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from evenpipe.megatron.cpu_mode.patching import patch
from evenpipe.upstream import Patch

__all__ = ["norm_patches"]


def norm_patches() -> list[Patch]:
    """torch's layer norm takes part in sequence parallelism."""
    return [
        patch(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            _marked_for_sequence_parallel,
            "megatron-core has sequence parallelism only with the layer norms of Apex and Transformer Engine",
            "(cls, config, hidden_size, eps=1e-05, persist_layer_norm=False, zero_centered_gamma=False, "
            "normalization='LayerNorm')",
        )
    ]


def _marked_for_sequence_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    """The parameters carry the mark by which megatron-core sums their gradients over tensor-parallel ranks."""

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        unsplit = copy.copy(config)
        unsplit.sequence_parallel = False
        norm = original(cls, unsplit, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return new
