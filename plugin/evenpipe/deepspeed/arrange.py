"""Deals a PipelineModule's layers out to stages, and stages to ranks, as the section says, before an engine is made."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid

from evenpipe.deepspeed.section import Section, SectionError
from evenpipe.runtime.placement import NotPlacedError, place

__all__ = ["arrange", "can_follow", "is_dual"]

#: How DeepSpeed takes an optimizer that is a function.
_MAKES: Final = "which is called when layers have been dealt out (lambda parameters: AdamW(groups_of(model)))"


def arrange(section: Section, config: Mapping[str, Any], arguments: MutableMapping[str, Any]) -> None:
    """Deal the model's layers out as `section` of `config` says; `arguments` are those of `deepspeed.initialize`.

    `model` stays the same object; its parameters are other ones, and `model_parameters` follows. Raises SectionError
    where that cannot be.
    """
    module = arguments.get("model")
    if not isinstance(module, PipelineModule) or is_dual(type(module)):
        raise SectionError(
            "", f"{type(module).__name__} is no PipelineModule of one part a stage: leave the section out"
        )
    topology = _wanted_topology(section, module._topo, os.environ) or module._topo
    boundaries = module.parts
    plan = section.partition if isinstance(section.partition, Path) else None
    if isinstance(section.partition, tuple):
        boundaries = list(section.partition)
        _check_boundaries(boundaries, len(module._layer_specs), module.num_stages)
    layers_stay = plan is None and boundaries == module.parts
    if layers_stay and (topology is module._topo or (section.pair_adjacent is None and not can_follow(arguments))):
        # A placement that nobody asked for steps back before an optimizer or groups of parameters that are there.
        return
    asked_for = "pair_adjacent" if layers_stay else "partition"
    if isinstance(arguments.get("optimizer"), torch.optim.Optimizer):
        raise SectionError(
            asked_for,
            f"deals layers out anew, after the optimizer was made of them: give a function as optimizer, {_MAKES}; or "
            "name an optimizer in the configuration",
        )
    before, given = list(module.parameters()), arguments.get("model_parameters")
    # A generator, such as `model.parameters()`, is to be of the parameters that there are now.
    given = None if given is None else list(given)
    _let_go(module)
    _place(module, topology)
    if plan is None:
        _rebuild(module, boundaries)
    else:
        from evenpipe.deepspeed.planned.cutting import cut

        cut(module, plan, _dtype(config))
    arguments["model_parameters"] = _parameters_after(given, before, module, asked_for)


def is_dual(kind: type) -> bool:
    """Return whether modules of this kind have two parts a stage; by name, as not every release has such a class."""
    return any(base.__name__ == "DualPipeVModule" for base in kind.__mro__)


def can_follow(arguments: MutableMapping[str, Any]) -> bool:
    """Return whether the optimizer's parameters can be exchanged for other ones, by the arguments of ``initialize``.

    They cannot where an optimizer, or groups of parameters, were made before. A generator is replaced by its list.
    """
    if isinstance(arguments.get("optimizer"), torch.optim.Optimizer):
        return False
    given = arguments.get("model_parameters")
    if given is None:
        return True
    arguments["model_parameters"] = given = list(given)
    known = {id(one) for one in arguments["model"].parameters()}
    trained = {id(one) for one in arguments["model"].parameters() if one.requires_grad}
    return {id(one) for one in given} in (known, trained)


def _check_boundaries(boundaries: Sequence[int], layers: int, stages: int) -> None:
    """Raise SectionError unless `boundaries` give each of so many stages at least one of so many layers, in order."""
    said = f"{list(boundaries)}"
    if len(boundaries) != stages + 1:
        raise SectionError(
            "partition",
            f"{said} has {len(boundaries)} numbers: give {stages + 1}, for the {stages} stages of PipelineModule",
        )
    if boundaries[0] != 0 or boundaries[-1] != layers:
        raise SectionError("partition", f"{said} must begin with 0 and end with {layers}, the number of layers")
    if any(start >= stop for start, stop in pairwise(boundaries)):
        raise SectionError("partition", f"{said} must increase: every stage needs a layer")


def _let_go(module: Any) -> None:
    """Let go of what was built, since DeepSpeed reads its configuration when the module has been built."""
    for name in [name for name in module._modules if name.isdecimal()]:
        delattr(module, name)
    module.forward_funcs, module.fwd_map = [], {}
    module.tied_modules, module.tied_weight_attrs = torch.nn.ModuleDict(), {}
    module.is_checkpointable_results, module.is_checkpointable_results_interval = [], None


def _place(module: Any, topology: Any) -> None:
    """Give `module` this topology."""
    if topology is not module._topo:
        module._topo = topology
        module._grid = PipelineParallelGrid(process_group=module.world_group, topology=topology)
        module.stage_id = topology.get_coord(module.global_rank).pipe


def _rebuild(module: Any, boundaries: Sequence[int]) -> None:
    """Give `module` these boundaries, and build what this rank has of it then.

    The same specifications are built again, as PipelineModule's constructor does it: with `seed_layers`, to the same
    weights.
    """
    module.parts = list(boundaries)
    module._set_bounds(module.parts[module.stage_id], module.parts[module.stage_id + 1])
    module._build()
    module.to(get_accelerator().device_name(module.local_rank))
    module.tied_comms = module._index_tied_modules()
    module._synchronize_tied_weights()


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    """To which DeepSpeed casts a model's parameters."""
    for names, dtype in ((("bf16", "bfloat16"), torch.bfloat16), (("fp16",), torch.float16)):
        for name in names:
            given = config.get(name)
            if isinstance(given, Mapping) and given.get("enabled"):
                return dtype
    return torch.float32


def _parameters_after(
    given: Sequence[Any] | None, before: Sequence[torch.nn.Parameter], module: Any, asked_for: str
) -> Any:
    """Return the `model_parameters` for `deepspeed.initialize`, where it was given some that were there `before`.

    None stays None. Raises SectionError where they are neither all of the module's nor all that are trained.
    asked_for: the key for which there are others now.
    """
    if given is None:
        return None
    known, trained = {id(one) for one in before}, {id(one) for one in before if one.requires_grad}
    if {id(one) for one in given} == known:
        return list(module.parameters())
    if {id(one) for one in given} == trained:
        return [one for one in module.parameters() if one.requires_grad]
    raise SectionError(
        asked_for,
        "deals layers out anew, after model_parameters was made of them: for groups, give a function as optimizer, "
        f"{_MAKES}; else give all of the model's, those that require a gradient, or none",
    )


class _PairAdjacentTopology(PipeDataParallelTopology):  # type: ignore[misc]
    """`num_pp` stages and `num_dp` replicas on nodes of `ranks_per_node` ranks, numbered node after node.

    Raises ValueError where they do not fill whole nodes.
    """

    def __init__(self, num_pp: int, num_dp: int, ranks_per_node: int) -> None:
        super().__init__(num_pp=num_pp, num_dp=num_dp)
        slots = place(num_pp, 1, num_dp, ranks_per_node).slots
        self.mapping = {
            self.ProcessCoord(pipe=coordinate.pp, data=coordinate.dp): rank for rank, coordinate in enumerate(slots)
        }


def _wanted_topology(
    section: Section, present: PipeDataParallelTopology, environ: Mapping[str, str]
) -> _PairAdjacentTopology | None:
    """Return the topology that the section asks for; None where ranks stay as they are.

    Left to itself, it is asked for with bpipe on several nodes that have room for pairs, if there are pairs that trade
    (from 4 stages). Raises SectionError where it was asked for in so many words and cannot be.
    """
    try:
        return _paired(section, present, environ)
    except NotPlacedError as obstacle:
        if section.pair_adjacent:
            raise SectionError("pair_adjacent", f"{obstacle}") from None
        return None


def _paired(
    section: Section, present: PipeDataParallelTopology, environ: Mapping[str, str]
) -> _PairAdjacentTopology | None:
    stages, replicas = present.get_dim("pipe"), present.get_dim("data")
    # torchrun's name, and that of DeepSpeed's launcher.
    given = environ.get("LOCAL_WORLD_SIZE", environ.get("LOCAL_SIZE"))
    if section.pair_adjacent is None:
        per_node = int(given or 0)
        if not section.bpipe or stages < 4 or per_node < 2 or per_node >= present.world_size():
            return None
    if section.pair_adjacent is False:
        return None
    if type(present) is not PipeDataParallelTopology:
        raise NotPlacedError(
            f"PipelineModule was given a {type(present).__name__}, which places ranks itself: give it num_stages, or "
            "leave this out"
        )
    if given is None:
        raise NotPlacedError("LOCAL_WORLD_SIZE is not set: start the processes with torchrun or deepspeed")
    try:
        return _PairAdjacentTopology(stages, replicas, int(given))
    except ValueError as error:
        raise NotPlacedError(str(error)) from None
