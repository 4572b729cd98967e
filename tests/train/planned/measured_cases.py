"""Small models, cut for schedules whose backwards are in halves: what each stage saves at most, beside its plan.

Arguments: a file of cases ([model, schedule, stages, chunks]), and one for what is found. A script of its own.

A batch's input is one storage, of which all micro-batches save a part: so it is small.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cases import SIZE, UNTIED, Alike, batch_of, example_of
from torch import Tensor, nn

from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.models import Example
from evenpipe.partition.profile import Profile
from evenpipe.partition.profiling import profile
from evenpipe.partition.search.finding import find_plan
from evenpipe.partition.search.plan import Plan
from evenpipe.partition.trace import trace
from evenpipe.stage_code import write_stages
from evenpipe.torch.planned import PlannedPipeline

MICRO_BATCHES, WIDTH = 8, 64


class Stack(nn.Module):
    """Linear layers with activation functions between."""

    def __init__(self) -> None:
        super().__init__()
        wide = [part for _ in range(8) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.layers = nn.Sequential(nn.Linear(1, WIDTH), *wide)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).square().mean()


def made(model: str) -> Example:
    if model == UNTIED:
        return example_of(UNTIED)
    torch.manual_seed(0)
    return Example("stack", Stack(), {"images": torch.randn(SIZE * 16, 1)})


def cut(model: str, schedule: str, stages: int, chunks: int, path: Path) -> None:
    example = made(model)
    graph = trace(example.model, example.inputs)
    found: Profile = profile(graph, Alike(), example.name)
    plan: Plan = find_plan(found, Workload(schedule, MICRO_BATCHES, chunks), stages, 1 << 40)
    plan.write(path)
    write_stages(graph, found, plan, path)


def measure(rank: int, port: int, stages: int, model: str, path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=stages)
    example = made(model)
    pipeline = PlannedPipeline(path, example.model, measure=True)
    for step in range(2):
        pipeline.step(batch_of(example, MICRO_BATCHES, step))
    own = [part for part in pipeline.plan.stages if part.stage == rank]
    predicted = own[0].peak_bytes - sum(part.beside_bytes for part in own)
    everybody: list[Any] = [None] * stages
    dist.all_gather_object(everybody, (predicted, pipeline.executor.counter.peak_bytes))
    if rank == 0:
        path.with_suffix(".found").write_text(json.dumps(everybody))
    dist.destroy_process_group()


if __name__ == "__main__":
    results = []
    for model, schedule, stages, chunks in json.loads(Path(sys.argv[1]).read_text()):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "P.json"
            cut(model, schedule, stages, chunks, path)
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            port = store.port
            del store
            mp.start_processes(measure, (port, stages, model, path), nprocs=stages, start_method="fork")
            results.append(json.loads(path.with_suffix(".found").read_text()))
    Path(sys.argv[2]).write_text(json.dumps(results))
