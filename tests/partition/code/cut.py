"""A model cut by hand or by a search, and its parts run one after the other as stages would."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from evenpipe.descriptions import device
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.dawnpiper.problem import Problem
from evenpipe.partition.models import Example
from evenpipe.partition.profile import Profile
from evenpipe.partition.profiling import profile
from evenpipe.partition.search.plan import Plan, plan_of
from evenpipe.partition.timing import Roofline
from evenpipe.partition.trace import Graph
from evenpipe.stage_code import Draws, Part, drawing, load_parts, write_stages

SEED = 5
CPU = Roofline(device("a100-40gb"))


def profiled(example: Example, graph: Graph) -> Profile:
    return profile(graph, CPU, example.name)


def plan_at(found: Profile, stages: int, cuts: Sequence[int], schedule: str = "1f1b", chunks: int = 1) -> Plan:
    """A plan of these cuts, which name the last node of each part but the last."""
    workload = Workload(schedule, 2 * stages, chunks)
    problem = Problem.of(found, workload, stages, 1 << 50)
    starts = problem.costs.starts.tolist()
    bounds = [0, *(starts.index(cut + 1) for cut in cuts), problem.costs.last]
    return plan_of(problem, bounds, problem.fits_of(bounds), workload)


def drawn_cuts(graph: Graph, count: int, seed: int) -> list[int]:
    return sorted(random.Random(seed).sample([n for n, cut in enumerate(graph.cut_allowed) if cut], count))


def written(example: Example, graph: Graph, plan: Plan, found: Profile, path: Path) -> list[Part]:
    """The plan and its code at `path`, read again: all parts in the order of the model."""
    plan.write(path)
    write_stages(graph, found, plan, path)
    of_stage = {stage: iter(load_parts(path, stage, example.model)) for stage in range(plan.stage_count)}
    return [next(of_stage[part.stage]) for part in plan.stages]


def batches(example: Example, many: int) -> list[dict[str, Tensor]]:
    """Inputs like the example's, with other values, below the smallest vocabulary; masks stay."""
    generator = torch.Generator().manual_seed(SEED)

    def other(name: str, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        return tensor if "mask" in name else torch.randint(0, 2, tensor.shape, generator=generator)

    return [{name: other(name, tensor) for name, tensor in example.inputs.items()} for _ in range(many)]


def train_uncut(model: nn.Module, given: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Losses, gradients and buffers after these micro-batches of the user's own model."""
    model.zero_grad()
    losses = {}
    for number, inputs in enumerate(given):
        with drawing(SEED, number):
            out = model(**inputs)
        loss = out if isinstance(out, Tensor) else out["loss"]
        loss.backward()
        losses[f"loss {number}"] = loss.detach()
    return losses | _gradients(model)


def train_cut(model: nn.Module, parts: Sequence[Part], given: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The same of its parts: what one sends the next receives as copies, and gradients come back."""
    model.zero_grad()
    losses = {}
    for number, inputs in enumerate(given):
        losses[f"loss {number}"] = _step(parts, inputs, Draws(SEED, number))
    return losses | _gradients(model)


def _step(parts: Sequence[Part], inputs: Mapping[str, Tensor], draws: Draws) -> Tensor:
    received: tuple[Tensor, ...] = ()
    sent: list[tuple[Tensor, ...]] = []
    got: list[tuple[Tensor, ...]] = []
    for part in parts:
        got.append(received)
        sent.append(part({name: inputs[name] for name in part.INPUTS}, draws, *received))
        assert part.LAST or [(tuple(t.shape), t.dtype, t.requires_grad) for t in sent[-1]] == [
            (to.shape, to.dtype, to.gradient) for to in part.SENDS
        ]
        assert all(tensor.is_contiguous() for tensor in sent[-1])
        received = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in sent[-1])
    gradients: list[Tensor | None] = [None]
    for mine, given in zip(reversed(sent), reversed(got), strict=True):
        pairs = [(out, back) for out, back in zip(mine, gradients, strict=True) if out.requires_grad]
        torch.autograd.backward([out for out, _ in pairs], [back for _, back in pairs])
        gradients = [tensor.grad for tensor in given]
    return sent[-1][0].detach()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


def adds_up_alike(graph: Graph, cuts: Sequence[int]) -> bool:
    """Whether gradients of values with several uses are summed in the model's own order.

    Backward adds them up from the last use to the first, and a part's sum comes before those of the parts before it: so
    no later part may have an earlier use. Of two uses the order is all one.
    """
    part_of = {node: sum(cut < number for cut in cuts) for number, node in enumerate(graph.nodes)}
    own = {node: number for number, node in enumerate(graph.own_order)}
    for node in graph.nodes:
        parts = [part_of[user] for user in sorted(node.users, key=lambda user: own.get(user, 0)) if user in part_of]
        if len(parts) > 2 and parts != sorted(parts):
            return False
    return True


def tied(example: Example, parts: Sequence[Part]) -> set[str]:
    """Parameters that several parts use: their gradients are added up micro-batch by micro-batch and part by part."""
    held = [parameter for part in parts for parameter in part.parameters()]
    shared = {id(parameter) for parameter in held if sum(parameter is other for other in held) > 1}
    return {f"gradient of {name}" for name, parameter in example.model.named_parameters() if id(parameter) in shared}
