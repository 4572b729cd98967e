"""Checkpoints of a cut PipelineModule: DeepSpeed's own, a file a layer, whatever stages have it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.state_dict_factory import SDLoaderFactory
from torch import Tensor

from evenpipe.deepspeed.planned.cutting import layers_of

__all__ = ["load_layers", "save_layers"]


def save_layers(engine: Any, folder: Any, exclude_frozen_parameters: bool) -> None:
    """Write the layers' files as PipelineModule does: one replica's stages, all of them.

    The first stage that has something of a layer writes it; the others give it theirs.
    """
    module = engine.module
    if engine.grid.get_data_parallel_id() != 0:
        return
    mine = {
        layer: {
            name: one
            for name, one in _scope(module, layer).state_dict(keep_vars=True).items()
            if one.requires_grad or not (exclude_frozen_parameters and hasattr(one, "ds_pipe_replicated"))
        }
        for layer in layers_of(module)
        if _scope(module, layer) is not None
    }
    group = engine.grid.get_pipe_parallel_group()
    held: list[Any] = [None] * engine.num_stages
    dist.all_gather_object(held, list(mine), group=group)
    first = {layer: stage for stage, layers in reversed(list(enumerate(held))) for layer in layers}
    given = {layer: _on_host(state) for layer, state in mine.items() if first[layer] != engine.stage_id}
    others: list[Any] = [None] * engine.num_stages
    dist.all_gather_object(others, given, group=group)
    engine.checkpoint_engine.makedirs(folder, exist_ok=True)
    for layer, numbers in layers_of(module).items():
        if first.get(layer, 0) != engine.stage_id:
            continue
        state: dict[str, Tensor] = {}
        for part in (*reversed(others), mine):
            state |= part.get(layer, {})
        for number in _with_file(module, numbers):
            path = module.ckpt_layer_path(folder, number - module._local_start)
            engine.checkpoint_engine.save(state_dict=clone_tensors_for_torch_save(_plain(state)), path=path)


def load_layers(engine: Any, folder: Any, strict: bool) -> None:
    """Read what this stage has of layers from files that a PipelineModule has written, cut or not."""
    module = engine.module
    for layer, numbers in layers_of(module).items():
        scope = _scope(module, layer)
        if scope is None:
            continue
        [number, *_] = _with_file(module, numbers)
        files = module.ckpt_layer_path_list(folder, number - module._local_start)
        loader = SDLoaderFactory.get_sd_loader(files, version=2.0, checkpoint_engine=engine.checkpoint_engine)
        _, saved, _ = loader.load(1, 0, module_key=None, is_pipe_parallel=True)
        scope.load_state_dict({name: saved[name] for name in scope.state_dict() if name in saved}, strict=strict)
    module._synchronize_tied_weights()


def _with_file(module: Any, numbers: list[int]) -> list[int]:
    """Return those of a layer's numbers that have a file, or else the first.

    DeepSpeed writes none for tied layers with a function of their own.
    """
    specs = module._layer_specs
    found = [n for n in numbers if not isinstance(specs[n], TiedLayerSpec) or specs[n].forward_fn is None]
    return found or numbers[:1]


def _scope(module: Any, layer: str) -> Any:
    """Return what this stage has of a layer."""
    scope = module
    for step in layer.split("."):
        scope = scope._modules.get(step) if scope is not None else None
    return scope


def _plain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.detach() for name, one in state.items()}


def _on_host(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.detach().cpu() for name, one in state.items()}
