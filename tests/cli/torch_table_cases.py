"""Every rank: the tables that are written for torch, trained by torch.distributed.pipelining itself."""

import json
import sys
from pathlib import Path

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.runtime.ranks import report

WIDTH, ROWS = 6, 2


def part(position: int) -> torch.nn.Module:
    torch.manual_seed(position)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())


def batch(micro_batches: int) -> torch.Tensor:
    return torch.randn(micro_batches * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def gradients(module: torch.nn.Module) -> list[str]:
    return [parameter.grad.numpy().tobytes().hex() for parameter in module.parameters()]


def train(case: dict, table: str, rank: int) -> dict:
    """This rank's gradients by position, and the losses where the model ends."""
    owner = {int(position): stage for position, stage in case["owner"].items()}
    mine = {position: part(position) for position, stage in owner.items() if stage == rank}
    stages = [PipelineStage(module, at, len(owner), torch.device("cpu")) for at, module in mine.items()]
    for stage in stages:
        stage.stage_index_to_group_rank = owner
    schedule = _PipelineScheduleRuntime(stages, case["micro_batches"], torch.nn.functional.mse_loss, scale_grads=False)
    schedule._load_csv(table)
    losses: list[torch.Tensor] = []
    inputs = batch(case["micro_batches"])
    given = (inputs,) if owner[0] == rank else ()
    target = {"target": inputs, "losses": losses} if owner[len(owner) - 1] == rank else {}
    schedule.step(*given, **target)
    return {
        "losses": [loss.item().hex() for loss in losses],
        "gradients": {at: gradients(module) for at, module in mine.items()},
    }


def work(rank: int, folder: Path) -> dict:
    cases = json.loads((folder / "cases.json").read_text())
    return {name: train(case, str(folder / f"{name}.csv"), rank) for name, case in cases.items()}


if __name__ == "__main__":
    report(int(sys.argv[2]), work)
