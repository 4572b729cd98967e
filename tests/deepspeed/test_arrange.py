"""A placement that nobody asked for gives way, and modules of two parts a stage are known by their ancestors too."""

from __future__ import annotations

import torch

from evenpipe.deepspeed.arrange import can_follow, is_dual


def test_a_subclass_has_two_parts_a_stage_too() -> None:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
    from deepspeed.runtime.pipe.module import PipelineModule

    assert is_dual(type("Mine", (DualPipeVModule,), {}))
    assert not is_dual(type("Mine", (PipelineModule,), {}))


def test_groups_and_optimizers_that_are_there_cannot_follow() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    groups = [{"params": [model[1].weight]}, {"params": [model[1].bias], "weight_decay": 0.0}]
    assert not can_follow({"model": model, "model_parameters": groups})
    assert not can_follow({"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    assert can_follow({"model": model})
    arguments = {"model": model, "model_parameters": (one for one in model.parameters() if one.requires_grad)}
    assert can_follow(arguments)
    assert arguments["model_parameters"] == [model[1].weight, model[1].bias]
