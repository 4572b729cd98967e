"""A plan held against its model: losses and gradients of its stages; and against a run: predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from evenpipe.partition.search.plan import Plan
from evenpipe.partition.trace import Graph
from evenpipe.report.log_line import Taken, comparison_lines
from evenpipe.runtime.resources import StageFigures
from evenpipe.stage_code.loading import load_parts
from evenpipe.stage_code.part import Draws, Part, StageCodeError, drawing

__all__ = ["compare_stages", "compare_with_plan", "too_large"]

#: Limits of the comparison: seconds on a host of a few cores.
_MOST_BYTES: Final = 2 << 30
_MOST_FLOPS: Final = 100e9

#: One micro-batch does not show state that changes with every forward.
_MICRO_BATCHES: Final = 2

#: Share of their norm by which they may differ: additions in another order, in fp32 and in less.
_ROUNDING: Final = 1e-3
_COARSE: Final = 0.25
_FINE: Final = {torch.float64, torch.float32}


def too_large(graph: Graph) -> str | None:
    """Return why a forward and backward of this model is not run on the host, in words; None where it may be."""
    nbytes = sum(one.nbytes for one in graph.module.parameters())
    if nbytes > _MOST_BYTES:
        return f"its parameters take {nbytes / 2**30:.1f} GiB, and at most {_MOST_BYTES >> 30} are made for that"
    with FlopCounterMode(display=False) as counter:
        graph.evaluate(lambda node, args, kwargs: node.target(*args, **kwargs))  # type: ignore[operator]
    flops = counter.get_total_flops()
    if flops > _MOST_FLOPS:
        return f"a forward takes {flops / 1e9:.0f} GFLOP, and at most {_MOST_FLOPS / 1e9:.0f} are spent on that"
    return None


def compare_stages(plan_path: Path, model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raise StageCodeError, one line, where the stages beside `plan_path` have not the model's loss and gradients.

    Both run forward and backward of the micro-batch `inputs` twice in a row, and draw the same random numbers.
    Gradients of the whole model are in memory twice.
    """
    learned = {name: one for name, one in model.named_parameters() if one.requires_grad}
    tensors = {name: one for name, one in inputs.items() if isinstance(one, Tensor)}
    parts = _parts(plan_path, model)
    buffers = list(model.buffers())  # the parts have the same
    of_model = [one.clone() for one in buffers]
    for number in range(_MICRO_BATCHES):
        with torch.enable_grad():
            loss = _by_stages(parts, tensors, Draws(0, number))
            gradients = _gradients(loss, learned)
            _exchange(buffers, of_model)
            with drawing(0, number):
                returned = tree_leaves(model(**inputs))
            models_loss = next(leaf for leaf in returned if isinstance(leaf, Tensor) and leaf.numel() == 1)
            models_gradients = _gradients(models_loss, learned)
            _exchange(buffers, of_model)
        _compare({"the loss": loss.detach(), **gradients}, {"the loss": models_loss.detach(), **models_gradients})


def _compare(by_stages: Mapping[str, Tensor], by_model: Mapping[str, Tensor]) -> None:
    """Raise StageCodeError where a loss or gradients, by their names, differ by more than rounding."""
    tolerance = _ROUNDING if {tensor.dtype for tensor in by_model.values()} <= _FINE else _COARSE
    whole = torch.stack([tensor.float().norm() for what, tensor in by_model.items() if what != "the loss"]).norm()
    if not bool(torch.isfinite(whole)):
        return  # infinite or undefined gradients cannot be compared
    for what, other in by_model.items():
        differs, norm = (by_stages[what].float() - other.float()).norm(), other.float().norm()
        # The gradient of an attention key's bias is zero but for noise.
        if not bool(differs <= tolerance * (norm + (tolerance * whole if what != "the loss" else 0.0))):
            raise StageCodeError(
                f"{what} by the plan's stages differs from the model's own by {float(differs / norm):.1%}: "
                "something that forward does is not in the plan, such as state that changes or a gradient of its own; "
                "write it in torch's operations"
            )


def _exchange(ones: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for one, other in zip(ones, others, strict=True):
            value = one.clone()
            one.copy_(other)
            other.copy_(value)


def _parts(plan_path: Path, model: nn.Module) -> list[Part]:
    plan = Plan.read(plan_path)
    of_stage = [iter(load_parts(plan_path, stage, model)) for stage in range(plan.stage_count)]
    return [next(of_stage[part.stage]) for part in plan.stages]


def _by_stages(parts: Sequence[Part], inputs: Mapping[str, Tensor], draws: Draws) -> Tensor:
    passed: tuple[Tensor, ...] = ()
    for part in parts:
        received = [one if like.gradient else one.detach() for one, like in zip(passed, part.RECEIVES, strict=True)]
        passed = part(inputs, draws, *received)
    return passed[0]


def _gradients(loss: Tensor, learned: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the gradients of the parameters `learned`, by what a message calls them."""
    given = torch.autograd.grad(loss.sum(), list(learned.values()), allow_unused=True)
    return {
        f"the gradient of {name}": torch.zeros_like(one) if gradient is None else gradient
        for (name, one), gradient in zip(learned.items(), given, strict=True)
    }


def compare_with_plan(plan: Plan, figures: Sequence[StageFigures]) -> list[str]:
    """Return a line a stage. `figures`: of one batch of the plan's, with `peak_bytes` of all that a stage holds.

    Stages with several parts take the time of all of them; their peaks are of the whole stage.
    """
    of_stage = [[part for part in plan.stages if part.stage == stage] for stage in range(plan.stage_count)]
    names = ["nodes " + ", ".join(f"{part.first_node}–{part.last_node}" for part in parts) for parts in of_stage]
    predicted = [
        Taken(sum(part.forward_ms + part.backward_ms + part.extra_ms for part in parts), parts[0].peak_bytes)
        for parts in of_stage
    ]
    measured = [Taken(one.computed_ms / plan.micro_batches, one.peak_bytes) for one in figures]
    return comparison_lines(names, predicted, measured)
