"""Two gloo processes that train a ModulePipeline under paci and evaluate it in between.

Argument: a folder (rank-<rank>.json out). A script of its own, forked after the imports.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenpipe.schedule import Size, build
from evenpipe.torch.pipeline import ModulePipeline

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.runtime.ranks import report

STAGES, MICRO_BATCHES, BATCHES, EVALUATED = 2, 3, 8, 4


def part_of(position: int) -> nn.Module:
    torch.manual_seed(position)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def batch(number: int) -> Tensor:
    return torch.randn(2 * MICRO_BATCHES, 4, generator=torch.Generator().manual_seed(number))


def optimizer_of(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def expected() -> tuple[list[list[float]], float]:
    """The weights of both parts at the end, and the evaluated loss, by the rule: see tests/end_to_end/test_paci.py."""
    parts = [part_of(position) for position in range(STAGES)]
    optimizers = [optimizer_of(part) for part in parts]
    first = list(parts[0].parameters())
    before = [one.detach().clone() for one in first]
    evaluated = 0.0
    for number in range(BATCHES):
        if number == EVALUATED:
            with torch.no_grad():
                losses = [nn.functional.mse_loss(parts[1](parts[0](one)), one) for one in batch(0).chunk(MICRO_BATCHES)]
            evaluated = torch.stack(losses).mean().item()
        newest = [one.detach().clone() for one in first]
        for place, inputs in enumerate(batch(number).chunk(MICRO_BATCHES)):
            early = place < STAGES - 1 and number not in (0, EVALUATED)
            for one, old, new in zip(first, before, newest, strict=True):
                one.data.copy_(old if early else new)
            loss = nn.functional.mse_loss(parts[1](parts[0](inputs)), inputs) / MICRO_BATCHES
            for one, new in zip(first, newest, strict=True):
                one.data.copy_(new)
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        before = newest
    return [nn.utils.parameters_to_vector(part.parameters()).tolist() for part in parts], evaluated


def of_rank(rank: int, folder: Path) -> dict[str, Any]:
    program = build("paci", Size(STAGES, MICRO_BATCHES))
    pipeline = ModulePipeline(part_of, program, nn.functional.mse_loss, boundary=torch.empty(2, 4))
    training = pipeline.two_bw([(batch(number),) * 2 for number in range(BATCHES)], optimizer_of(pipeline))
    evaluated = None
    for done, _ in enumerate(training, 1):
        if done == EVALUATED:
            evaluated = pipeline.evaluate(batch(0), batch(0)).loss
    refused = []
    for asked in ({"clip_grad": 1.0}, {"delay_correction": "nesterov"}):
        try:
            pipeline.two_bw([], optimizer_of(pipeline), **asked)
        except ValueError as error:
            refused.append(str(error))
    weights, loss = expected()
    mine = nn.utils.parameters_to_vector(pipeline.parameters()).tolist()
    result = {"weights": mine == weights[rank], "refused": refused}
    return result | ({} if evaluated is None else {"evaluated": evaluated.item() == loss})


if __name__ == "__main__":
    report(STAGES, of_rank)
