"""Four gloo processes whose parts exchange several tensors of other shapes at every edge; what came of each schedule.

With 2bw also how many forwards of the batch ahead were alive before its stream was drained, and after.

Argument: a folder (rank-<rank>.json out). A script of its own, forked after the imports.
"""

import gc
import itertools
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenpipe.order_search.costs import Part, RunCosts
from evenpipe.order_search.search import Effort
from evenpipe.schedule import Program, Size, build, verify
from evenpipe.simulate.searched import searched
from evenpipe.torch.pipeline import ModulePipeline

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.runtime.ranks import report

STAGES, MICRO_BATCHES, ROWS, KINDS = 4, 8, 4, 5
SCHEDULES = {
    "1f1b, BPipe": (1, 1, True),
    "kfkb, BPipe": (1, 2, True),
    "interleaved, BPipe": (2, 1, True),
    "interleaved-zb": (2, 1, False),
    "zb-h1": (1, 1, False),
    "v-half": (2, 1, False),
    "v-half, recomputed": (2, 1, False),
    "1f1b, recomputed": (1, 1, False),
    "dualpipev": (2, 1, False),
    "1f1b, swapped": (1, 1, False),
    "v-half, swapped": (2, 1, False),
    "searched, swapped": (2, 1, False),
}


def width(position: int) -> int:
    """Of the hidden state that leaves the part at `position`."""
    return 8 * (1 + position % 3)


def edge(position: int) -> list[Tensor]:
    """The hidden state, what skips all parts in between, and which kind each row is of."""
    return [torch.empty(ROWS, width(position)), torch.empty(ROWS, 16), torch.empty(ROWS, dtype=torch.int64)]


class First(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(4, 16)
        self.narrow = torch.nn.Linear(16, width(0))

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inner = self.wide(value)
        return self.narrow(torch.nn.functional.gelu(inner)), torch.tanh(inner), value.sum(1).abs().long() % KINDS


class Middle(torch.nn.Module):
    def __init__(self, position: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width(position - 1), width(position))
        self.kind = torch.nn.Embedding(KINDS, width(position))

    def forward(self, hidden: Tensor, skipped: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.nn.functional.gelu(self.linear(hidden)) + self.kind(kinds), skipped, kinds


class Last(torch.nn.Module):
    def __init__(self, position: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width(position - 1) + 16, 1)

    def forward(self, hidden: Tensor, skipped: Tensor, kinds: Tensor) -> Tensor:
        return self.linear(torch.cat([hidden, skipped], 1)) * kinds[:, None]


def part_of(parts: int, position: int) -> torch.nn.Module:
    torch.manual_seed(position)
    if position == 0:
        return First()
    return Last(position) if position == parts - 1 else Middle(position)


def inputs() -> Tensor:
    return torch.randn(MICRO_BATCHES * ROWS, 4, generator=torch.Generator().manual_seed(7))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target[:, :1]).square().mean()


def gradients(modules: list[torch.nn.Module]) -> list[list[str]]:
    return [
        [
            torch.zeros(()).expand_as(one).tolist() if one.grad is None else one.grad.tolist()
            for one in part.parameters()
        ]
        for part in modules
    ]


def outputs(parts: int) -> list[list[float]]:
    """Of the whole model."""
    taken: tuple[Tensor, ...] = (inputs(),)
    for position in range(parts):
        given = part_of(parts, position)(*taken)
        taken = given if isinstance(given, tuple) else (given,)
    return taken[0].tolist()


def without_a_pipeline(parts: int) -> tuple[float, list[list[str]]]:
    """The mean loss, and the gradients of each part."""
    modules, losses = [part_of(parts, position) for position in range(parts)], []
    for value in inputs().chunk(MICRO_BATCHES):
        taken: tuple[Tensor, ...] = (value,)
        for module in modules:
            given = module(*taken)
            taken = given if isinstance(given, tuple) else (given,)
        losses.append(loss(taken[0], value))
        (losses[-1] / MICRO_BATCHES).backward()
    return torch.stack(losses).mean().item(), gradients(modules)


class Forward:
    """Alive as long as a micro-batch's graph is."""


class Tied(torch.autograd.Function):
    """Gives back what it is given; its graph keeps a `Forward`, which `alive` knows."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, alive: weakref.WeakSet[Forward]) -> Tensor:
        ctx.forward = Forward()
        alive.add(ctx.forward)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def drained() -> list[int]:
    """Forwards that are alive after a batch of 2bw, and after the stream has dropped those of the next."""
    alive = weakref.WeakSet[Forward]()

    def part(position: int) -> torch.nn.Module:
        made = part_of(STAGES, position)
        first = made.wide if isinstance(made, First) else made.linear
        first.register_forward_hook(lambda module, given, value: Tied.apply(value, alive))
        return made

    pipeline = ModulePipeline(part, build("2bw", Size(STAGES, MICRO_BATCHES)), loss, edge)
    stream = pipeline.two_bw(itertools.repeat((inputs(), inputs())), torch.optim.SGD(pipeline.parameters(), lr=0.1))
    gc.collect()
    gc.disable()
    next(stream)
    ahead = len(alive)
    pipeline.evaluate(inputs(), inputs())  # makes the steps that are due
    left = len(alive)
    gc.enable()
    pipeline.close()
    return [ahead, left]


def searched_program() -> Program:
    """An order in a V for even stages that hold four of eight parts, and swap one in the time of its forward."""
    parts = [Part(forward_ms=1, input_gradient_ms=1, weight_gradient_ms=1, saved_bytes=100)] * (2 * STAGES)
    costs = RunCosts(
        format="evenpipe.costs/1", placement="vee", parts=parts, memory_bytes=[400] * STAGES, host_bytes_per_ms=100
    )
    return searched(costs, STAGES, MICRO_BATCHES, Effort(0.1, 2)).program


def run(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (chunks, group, bpipe) in SCHEDULES.items():
        known = name.partition(",")[0]
        size = Size(STAGES, MICRO_BATCHES, chunks, group)
        program = searched_program() if known == "searched" else build(known, size, bpipe)
        if name.endswith("recomputed"):
            program = verify(replace(program.schedule, recomputed=frozenset(range(1, STAGES * chunks, 2))))
        parts, places = STAGES * chunks, program.schedule.places
        swap = (1.0 if known == "searched" else 0.5) if name.endswith("swapped") else None
        pipeline = ModulePipeline(
            lambda position, parts=parts: part_of(parts, position), program, loss, edge, swap=swap
        )
        mean = pipeline.step(inputs(), inputs())
        with torch.no_grad():
            refused = ""
            try:
                pipeline.step(inputs(), inputs())
            except ValueError as error:
                refused = str(error)
        evaluation = pipeline.evaluate(inputs(), inputs())
        some = pipeline.evaluate(inputs(), inputs(), tokens=[1, 1, *[0] * (MICRO_BATCHES - 2)])
        blind = pipeline.evaluate(inputs())
        positions = [places.position(rank, chunk) for chunk in range(chunks)]
        found[name] = {
            "loss": None if mean is None else mean.item(),
            "gradients": dict(zip(positions, gradients(pipeline.chunks), strict=True)),
            "swapped": pipeline.executor.counter.swapped_bytes,
            "evicted": pipeline.executor.counter.evicted_bytes,
            "evaluated": None if evaluation.loss is None else evaluation.loss.item(),
            "outputs": evaluation.outputs and torch.cat(evaluation.outputs).tolist(),
            "alike": str(evaluation.outputs) == str(blind.outputs) and blind.loss is None,
            "refused": refused,
            "weighed": None if some.loss is None else [some.loss.item(), torch.stack(some.losses[:2]).mean().item()],
        }
        pipeline.close()
    return found | {"drained": drained()}


if __name__ == "__main__":
    report(STAGES, run)
