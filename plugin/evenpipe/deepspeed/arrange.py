"""What the section says of the model, done before an engine is made for it: its partition and its placement."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

import torch
from deepspeed.runtime.pipe.module import PipelineModule

from evenpipe.deepspeed.layers import check_boundaries, deal_out, parameters_after
from evenpipe.deepspeed.section import Section, SectionError
from evenpipe.deepspeed.topology import wanted_topology

__all__ = ["arrange"]


def arrange(section: Section, arguments: MutableMapping[str, Any]) -> None:
    """Deal the model's layers out as `section` says; `arguments` are those of `deepspeed.initialize`.

    `model` stays the same object; its parameters are other ones, and `model_parameters` follows. Raises SectionError
    where that cannot be.
    """
    module = arguments.get("model")
    if not isinstance(module, PipelineModule) or type(module).__name__ == "DualPipeVModule":
        raise SectionError(
            "", f"{type(module).__name__} is no PipelineModule of one part a stage: leave the section out"
        )
    topology = wanted_topology(section, module._topo, os.environ) or module._topo
    boundaries = module.parts
    if section.partition is not None:
        boundaries = list(section.partition)
        check_boundaries(boundaries, len(module._layer_specs), module.num_stages)
    if boundaries == module.parts and topology is module._topo:
        return
    if isinstance(arguments.get("optimizer"), torch.optim.Optimizer):
        raise SectionError(
            "",
            "partition and pair_adjacent deal layers out anew, after the optimizer was made of them: give a function "
            "that makes it, or name it in the configuration",
        )
    before, given = list(module.parameters()), arguments.get("model_parameters")
    # A generator, such as `model.parameters()`, is to be of the parameters that there are now.
    given = None if given is None else list(given)
    deal_out(module, boundaries, topology)
    arguments["model_parameters"] = parameters_after(given, before, module)
