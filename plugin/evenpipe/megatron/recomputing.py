"""Layers of one model chunk computed again for some of its micro-batches, as Megatron's full recomputation does it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

__all__ = ["RULED_OUT_BY", "layers_of", "obstacle", "recomputing"]

#: `--recompute-granularity full --recompute-method uniform --recompute-num-layers 1`
_FULL: Final = MappingProxyType(
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
)
#: With these, Megatron recomputes no whole layers, or does so already, or not rightly. Not all releases have all.
RULED_OUT_BY: Final = (
    "recompute_granularity",
    "enable_cuda_graph",
    "external_cuda_graph",
    "cpu_offloading",
    "fine_grained_activation_offloading",
    "overlap_moe_expert_parallel_comm",
    "distribute_saved_activations",
    "mtp_num_layers",  # gradients of what its layers take by name are lost
)


def obstacle(config: Any, chunks: Sequence[nn.Module]) -> str | None:
    """Return what rules out that layers are recomputed in some of a stage's chunks only; None where nothing does."""
    if getattr(config, "cuda_graph_impl", None) not in (None, "none"):
        return "cuda_graph_impl"
    if getattr(config, "fp8", None) and getattr(config, "fp8_recipe", "delayed") == "delayed":
        return "fp8_recipe=delayed"  # Transformer Engine's queue of scales goes by the order of forwards
    # Megatron's checkpoints give no gradient to layers whose input needs none.
    if not all(parameter.requires_grad for chunk in chunks for parameter in chunk.parameters()):
        return "frozen parameters"
    if not all(any(isinstance(one, TransformerBlock) for one in chunk.modules()) for chunk in chunks):
        return "a model without TransformerBlock"
    return next((name for name in RULED_OUT_BY if getattr(config, name, None)), None)


def layers_of(chunk: nn.Module) -> list[nn.Module]:
    """Return the layers that `recomputing` counts; none where the chunk has not one block of them."""
    blocks = _blocks(chunk)
    return list(blocks[0].layers) if len(blocks) == 1 else []


@contextmanager
def recomputing(chunk: nn.Module, layers: int | None = None) -> Iterator[None]:
    """Within it, forwards of the chunk's blocks save the layers' inputs, and compute the rest again.

    `layers`: of so many from the first on; of all, if None.
    """
    configs: list[Any] = list({id(one.config): one.config for one in _blocks(chunk)}.values())
    before = [{name: getattr(config, name) for name in _FULL} for config in configs]
    first = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}
    _set(configs, [_FULL if layers is None else first] * len(configs))
    try:
        yield
    finally:
        _set(configs, before)


def _blocks(chunk: nn.Module) -> list[TransformerBlock]:
    return [one for one in chunk.modules() if isinstance(one, TransformerBlock)]


def _set(configs: Sequence[Any], values: Sequence[Mapping[str, Any]]) -> None:
    for config, given in zip(configs, values, strict=True):
        for name, value in given.items():
            setattr(config, name, value)
