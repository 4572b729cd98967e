"""Transformer layers in two halves: attention at the end of one part of a model, the MLP at the start of the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.spec_utils import ModuleSpec, get_module

from evenpipe.megatron.random_numbers import random_numbers_kept

__all__ = ["HalvedLayout", "build_halves"]


class HalvedLayout(PipelineParallelLayerLayout):  # type: ignore[misc]
    """A layout of which some parts begin with the MLP of the layer that the part before ends with.

    Such a layer is counted by both parts, under its one global number: what Megatron makes of it (specs, names in
    checkpoints, numbers) is that of the whole layer. `halves` are the parts' numbers, chunk by chunk, stage by stage.
    """

    def __init__(self, layout: str, stages: int, halves: Sequence[int]) -> None:
        super().__init__(layout, stages)
        self.halves = frozenset(halves)

    def begins_inside(self, vp_stage: int | None, pp_rank: int | None = None) -> bool:
        return self._part(vp_stage, pp_rank) in self.halves

    def ends_inside(self, vp_stage: int | None, pp_rank: int | None = None) -> bool:
        return self._part(vp_stage, pp_rank) + 1 in self.halves

    def get_num_layers_to_build(self, layer_type: Any = LayerType.decoder, vp_stage: Any = None, **rank: Any) -> int:
        shared = layer_type == LayerType.decoder and self.begins_inside(vp_stage, **rank)
        return int(super().get_num_layers_to_build(layer_type, vp_stage, **rank)) + shared

    def get_layer_offset(self, layer_type: Any = LayerType.decoder, vp_stage: Any = None, **rank: Any) -> int:
        shared = layer_type == LayerType.decoder and self.begins_inside(vp_stage, **rank)
        return int(super().get_layer_offset(layer_type, vp_stage, **rank)) - shared

    def _part(self, vp_stage: int | None, pp_rank: int | None) -> int:
        stage = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        return int((vp_stage or 0) * self.pipeline_model_parallel_size + stage)


def build_halves(build: Callable[[Any], None], block: Any) -> None:
    """`TransformerBlock._build_layers`, which is `build`, of a block whose part begins or ends inside a layer.

    Random numbers are drawn as if the part that has the layer's attention had all of it: that part makes the MLP too,
    hands its parameters to the next part, and lets go of it.
    """
    layout, specs = block.config.pipeline_model_parallel_layout, list(block.submodules.layer_specs)
    ends = layout.ends_inside(block.vp_stage)
    if layout.begins_inside(block.vp_stage):
        specs[0] = _half(specs[0], _second)
    if ends:
        specs[-1] = _half(specs[-1], _first)
    block.submodules = dataclasses.replace(block.submodules, layer_specs=specs)
    build(block)
    if ends:
        # With MTP layers Megatron looks for it where the last layer is: that is where the layer ends.
        block.final_layernorm = None


def _half(spec: ModuleSpec, make: Callable[[type], type]) -> ModuleSpec:
    return ModuleSpec(module=make(get_module(spec)), params=spec.params, submodules=spec.submodules)


def _first(layer: type) -> type:
    """`layer` with its attention alone."""

    def made(self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        layer.__init__(self, config, _only(submodules, mlp=False), *args, **kwargs)  # type: ignore[misc]
        _hand_on(layer(config, _only(submodules, mlp=True), *args, **kwargs))

    return type(f"{layer.__name__}Attention", (layer,), {"__init__": made})


def _second(layer: type) -> type:
    """`layer` with its MLP alone."""

    def made(self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        with random_numbers_kept(_device()):
            layer.__init__(self, config, _only(submodules, mlp=True), *args, **kwargs)  # type: ignore[misc]
        _take_over(self)

    return type(f"{layer.__name__}MLP", (layer,), {"__init__": made})


def _only(submodules: Any, mlp: bool) -> Any:
    """Return `submodules` with the other half's fields at their defaults: identities, as in a layer without it."""
    left_out = {
        field.name: field.default
        for field in dataclasses.fields(submodules)
        if ("mlp" in field.name) != mlp and field.default is not dataclasses.MISSING
    }
    return dataclasses.replace(submodules, **left_out)


def _hand_on(module: torch.nn.Module) -> None:
    group = parallel_state.get_pipeline_model_parallel_group()
    for tensor in _state(module):
        dist.send(tensor.detach().to(_device()), parallel_state.get_pipeline_model_parallel_next_rank(), group)


def _take_over(module: torch.nn.Module) -> None:
    group = parallel_state.get_pipeline_model_parallel_group()
    for tensor in _state(module):
        received = torch.empty_like(tensor, device=_device())
        dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank(), group)
        with torch.no_grad():
            tensor.copy_(received)


def _state(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _device() -> torch.device:
    """Return where tensors can be sent from, and random numbers are drawn."""
    backend = dist.get_backend(parallel_state.get_pipeline_model_parallel_group())
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
