"""Layers of one model chunk computed again for some of its micro-batches, as Megatron's full recomputation does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

from torch import nn

__all__ = ["obstacle", "recomputing"]

#: `--recompute-granularity full --recompute-method uniform --recompute-num-layers 1`
_FULL: Final = MappingProxyType(
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
)
#: With these, Megatron recomputes no whole layers, or does so already. Not all releases have all.
_APART: Final = (
    "recompute_granularity",
    "enable_cuda_graph",
    "external_cuda_graph",
    "cpu_offloading",
    "fine_grained_activation_offloading",
    "overlap_moe_expert_parallel_comm",
)


def obstacle(config: Any) -> str | None:
    """Return the setting beside which layers cannot be recomputed in some chunks only; None where there is none."""
    if getattr(config, "cuda_graph_impl", None) not in (None, "none"):
        return "cuda_graph_impl"
    return next((name for name in _APART if getattr(config, name, None)), None)


@contextmanager
def recomputing(chunk: nn.Module) -> Iterator[None]:
    """Within it, forwards of the chunk's blocks of layers save the layers' inputs, and compute the rest again."""
    blocks = [one for one in chunk.modules() if hasattr(one, "_checkpointed_forward")]
    configs: list[Any] = list({id(one.config): one.config for one in blocks}.values())
    before = [{name: getattr(config, name) for name in _FULL} for config in configs]
    for config in configs:
        vars(config).update(_FULL)
    try:
        yield
    finally:
        for config, values in zip(configs, before, strict=True):
            vars(config).update(values)
