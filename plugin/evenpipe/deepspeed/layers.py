"""A PipelineModule that exists already, with its layers dealt out to the stages anew."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from evenpipe.deepspeed.section import SectionError

__all__ = ["check_boundaries", "deal_out", "parameters_after"]


def check_boundaries(boundaries: Sequence[int], layers: int, stages: int) -> None:
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


def deal_out(module: Any, boundaries: Sequence[int], topology: Any) -> None:
    """Give `module` these boundaries and this topology, and build what this rank has of it then.

    DeepSpeed reads its configuration when the module has been built. So what was built is let go, and the same
    specifications are built again, as PipelineModule's constructor does it: with `seed_layers`, to the same weights.
    """
    for name in [name for name in module._modules if name.isdecimal()]:
        delattr(module, name)
    module.forward_funcs, module.fwd_map = [], {}
    module.tied_modules, module.tied_weight_attrs = torch.nn.ModuleDict(), {}
    module.is_checkpointable_results, module.is_checkpointable_results_interval = [], None
    if topology is not module._topo:
        module._topo = topology
        module._grid = PipelineParallelGrid(process_group=module.world_group, topology=topology)
        module.stage_id = topology.get_coord(module.global_rank).pipe
    module.parts = list(boundaries)
    module._set_bounds(module.parts[module.stage_id], module.parts[module.stage_id + 1])
    module._build()
    module.to(get_accelerator().device_name(module.local_rank))
    module.tied_comms = module._index_tied_modules()
    module._synchronize_tied_weights()


def parameters_after(given: Sequence[Any] | None, before: Sequence[torch.nn.Parameter], module: Any) -> Any:
    """What to give `deepspeed.initialize` as `model_parameters`, where it was given some that were there `before`.

    Raises SectionError where they are neither all of the module's nor all that are trained.
    """
    if given is None:
        return None
    known, trained = {id(one) for one in before}, {id(one) for one in before if one.requires_grad}
    if {id(one) for one in given} == known:
        return list(module.parameters())
    if {id(one) for one in given} == trained:
        return [one for one in module.parameters() if one.requires_grad]
    raise SectionError(
        "",
        "partition and pair_adjacent deal layers out anew, after model_parameters was made of them: give all of the "
        "model's, or those that require a gradient, or none",
    )
