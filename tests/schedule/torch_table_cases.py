"""Every rank: the tables that are written for torch, trained by torch.distributed.pipelining itself."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

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


def work(rank: int, folder: Path, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    cases = json.loads((folder / "cases.json").read_text())
    found = {name: train(case, str(folder / f"{name}.csv"), rank) for name, case in cases.items()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(work, (Path(sys.argv[1]), int(sys.argv[2])), nprocs=int(sys.argv[2]), start_method="fork")
