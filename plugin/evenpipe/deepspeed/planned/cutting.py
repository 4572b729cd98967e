"""Gives a PipelineModule this stage's part of a plan in the place of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime import utils
from torch import nn

from evenpipe.deepspeed.log import print_once
from evenpipe.deepspeed.planned.stage import CutStage, is_label
from evenpipe.deepspeed.planned.whole_model import LOSS, TIED, add_layer, cast_parameters
from evenpipe.deepspeed.section import SectionError
from evenpipe.partition.dawnpiper.problem import PartitionError
from evenpipe.partition.search.plan import Plan
from evenpipe.runtime.heartbeat import job_timeout
from evenpipe.stage_code import Part, StageCodeError, load_parts, part_types, tensors_of

__all__ = ["cut", "layer_of", "layers_of"]

_KEY = "partition"
_META = 256  # numbers that DeepSpeed describes a message with


def cut(module: Any, path: Path, dtype: torch.dtype) -> None:
    """Give a PipelineModule whose layers are let go of this stage's part of the plan at `path`; on all ranks alike.

    Parameters have the names and, with `seed_layers`, the values that they have without a plan. dtype: to which
    DeepSpeed will cast them. Raises SectionError where plan and module are not of each other.
    """
    with _failing_alike(module):
        stages = Plan.read(path).stage_count
        _refuse(module, path, stages)
        types = [one for stage in range(stages) for one in part_types(path, stage)]
        _check_messages(path, types)
        whole = _whole(module, path, types, dtype)
        [part] = load_parts(path, module.stage_id, whole)
    _take(module, part, CutStage(path, types, module.stage_id, part, module.base_seed))
    inside = _cut_layers(types)
    where = f"inside layer{'s' * (len(inside) != 1)} {', '.join(map(str, inside))}" if inside else "between layers"
    print_once(
        f"partition: {path} cuts PipelineModule's {len(module._layer_specs)} layers {where}: stages compute the code "
        f"in {path.stem}.stage0.py to {path.stem}.stage{stages - 1}.py"
    )


@contextmanager
def _failing_alike(module: Any) -> Iterator[None]:
    """Raise SectionError on all ranks where something inside is wrong on any, lest others wait for it."""
    line = None
    try:
        yield
    except (SectionError, StageCodeError, PartitionError) as error:
        line = str(error) if isinstance(error, SectionError) else str(SectionError(_KEY, str(error)))
    lines: list[Any] = [None] * module.world_size
    dist.all_gather_object(lines, line, group=module.world_group)
    for said in filter(None, lines):
        raise SectionError(None, said)


def layer_of(name: str) -> str:
    """Return the layer that a parameter is of: "3" of "3.weight"; "tied_modules.embedding" of a tied one."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == TIED else first


def layers_of(module: Any) -> dict[str, list[int]]:
    """Return what each of these names stands for: numbers of layers of a PipelineModule, in its order."""
    found: dict[str, list[int]] = {}
    for number, layer in enumerate(module._layer_specs):
        name = f"{TIED}.{layer.key}" if isinstance(layer, TiedLayerSpec) else str(number)
        if isinstance(layer, nn.Module | LayerSpec):
            found.setdefault(name, []).append(number)
    return found


def _refuse(module: Any, path: Path, stages: int) -> None:
    """Raise SectionError for the first setting of PipelineModule under which this plan is not carried out."""
    if stages != module.num_stages:
        raise SectionError(
            _KEY,
            f"{path}: is for {stages} stages, and PipelineModule has {module.num_stages}: give it as many, or make a "
            f"plan with --stages {module.num_stages}",
        )
    if module.dynamic_shape:
        raise SectionError(_KEY, f"{path}: a plan is of one shape: leave PipelineModule's dynamic_shape out")
    if module._grid.get_slice_parallel_world_size() > 1:
        raise SectionError(_KEY, f"{path}: a plan knows no model parallelism: use pipeline and data parallelism only")
    if isinstance(module.loss_fn, nn.Module) and any(True for _ in module.loss_fn.parameters()):
        raise SectionError(_KEY, f"{path}: loss_fn has parameters, which DeepSpeed does not save: make it a layer")


def _whole(module: Any, path: Path, types: Sequence[type[Part]], dtype: torch.dtype) -> nn.Module:
    """Return the layers that this stage has anything of, and those that no stage has, as one module would have them.

    Raises SectionError where the layers have parameters that the plan does not know.
    """
    planned = {name for one in types for name in one.STATE}
    everywhere = {layer_of(name) for name in planned}
    here = {layer_of(name) for name in types[module.stage_id].STATE}
    whole = nn.Module()
    whole.add_module(TIED, nn.ModuleDict())
    for name, numbers in layers_of(module).items():
        if name in here or name not in everywhere:
            _seed(module, numbers[0])
            add_layer(whole, numbers[0], module._layer_specs[numbers[0]])
    if isinstance(module.loss_fn, nn.Module):
        whole.add_module(LOSS, module.loss_fn)
    known = {id(one) for name, one in tensors_of(whole).items() if name in planned}
    for name, saved in whole.state_dict(keep_vars=True).items():
        if id(saved) not in known:
            raise SectionError(
                _KEY, f"{path}: the plan knows no {name!r}, which PipelineModule's layers have: make one of this model"
            )
    cast_parameters(whole, dtype)
    return whole.to(get_accelerator().device_name(module.local_rank))


def _seed(module: Any, number: int) -> None:
    """As PipelineModule does before it builds a layer."""
    if module.seed_layers:
        (module.seed_fn or utils.set_random_seed)(module.base_seed + number)


def _check_messages(path: Path, types: Sequence[type[Part]]) -> None:
    """Raise SectionError for what DeepSpeed cannot bring to a stage."""
    for stage, one in enumerate(types):
        if not one.LAST and any(map(is_label, one.INPUTS)):
            raise SectionError(
                _KEY,
                f"{path}: stage {stage} reads the labels, which DeepSpeed gives to the last stage only: make a plan "
                "with other --stages or --memory-gib, or move what reads them to the end of the loss",
            )
        shapes = [boundary.shape for boundary in one.SENDS]
        later = (each for part in types[stage + 1 :] for each in _inputs(part))
        inputs = {name: len(shape) for name, shape in later if not is_label(name)}
        if 2 + sum(2 + len(shape) for shape in shapes) + sum(2 + count for count in inputs.values()) > _META:
            raise SectionError(
                _KEY,
                f"{path}: stage {stage} sends {len(shapes) + len(inputs)} tensors, more than DeepSpeed can describe: "
                "make a plan with other --stages",
            )
        if any(boundary.dtype.is_complex for boundary in one.SENDS):
            raise SectionError(
                _KEY, f"{path}: stage {stage} sends complex numbers, for which DeepSpeed sends no gradients back"
            )


def _inputs(part: type[Part]) -> list[tuple[str, tuple[int, ...]]]:
    return list(zip(part.INPUTS, part.INPUT_SHAPES, strict=True))


def _cut_layers(types: Sequence[type[Part]]) -> list[int]:
    """Return the numbers of layers that several stages have something of, in order, except tied ones."""
    stages: dict[str, set[int]] = {}
    for stage, one in enumerate(types):
        for name in one.STATE:
            stages.setdefault(layer_of(name), set()).add(stage)
    return sorted(int(layer) for layer, having in stages.items() if len(having) > 1 and layer.isdecimal())


def _take(module: Any, part: Part, stage: CutStage) -> None:
    """`module` has `stage` as its only layer here, and the part's parameters by their own names."""
    scopes = dict(part.named_children())
    tied: dict[str, Any] = dict(scopes.pop(TIED).named_children()) if TIED in scopes else {}
    scopes.pop(LOSS, None)
    delattr(module, TIED)
    if LOSS in module._modules:
        delattr(module, LOSS)
    module.loss_fn = None  # the last stage's part has it
    for name, scope in scopes.items():
        module.add_module(name, scope)
    module.add_module(TIED, nn.ModuleDict(tied))
    module.forward_funcs, module.fwd_map = [stage], {}
    module.parts = list(range(module.num_stages + 1))
    module._set_bounds(module.stage_id, module.stage_id + 1)
    for one in module.parameters():
        one.ds_pipe_replicated = False
    module.tied_comms = _comms(module, _own(part, stage.types))
    module._synchronize_tied_weights()


def _own(part: Part, types: Sequence[type[Part]]) -> list[str]:
    """Return the stage's parameters, each by that of its names which the stages' code has for it."""
    planned = {name for one in types for name in one.STATE}
    names: dict[int, str] = {}
    for name, one in sorted(part.named_parameters(remove_duplicate=False)):
        if name in planned:
            names.setdefault(id(one), name)
    return list(names.values())


def _comms(module: Any, own: Sequence[str]) -> dict[str, Any]:
    """As PipelineModule has them: of parameters that several stages use, who sums their gradients.

    DeepSpeed finds them among the tied modules, so what else is shared joins these under a name more.
    """
    held: list[Any] = [None] * module.world_size
    dist.all_gather_object(held, (module.stage_id, list(own)), group=module.world_group)
    stages: dict[str, set[int]] = {}
    for stage, names in held:
        for name in names:
            stages.setdefault(name, set()).add(stage)
    shared: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name in sorted(name for name, having in stages.items() if len(having) > 1):
        shared.setdefault((layer_of(name), tuple(sorted(stages[name]))), []).append(name)
    found: dict[str, Any] = {}
    for number, ((layer, having), names) in enumerate(shared.items()):
        for replica in range(module._grid.data_parallel_size):
            ranks = [module._grid.stage_to_global(stage_id=stage, data=replica) for stage in having]
            group = dist.new_group(ranks, timeout=job_timeout())
            if module.global_rank not in ranks:
                continue
            key, scope = f"shared {number}", module.get_submodule(layer)
            module.tied_modules[key] = scope
            attributes = [name.removeprefix(f"{layer}.") for name in names]
            found[key] = {"ranks": ranks, "group": group, "weight_attr": attributes, "module": scope}
            if module.global_rank != ranks[0]:
                for name in attributes:
                    module._recursive_getattr(scope, name).ds_pipe_replicated = True
    return found
