"""Your own nn.Modules under any schedule: torchrun --nproc-per-node 4 examples/plain_torch.py [SCHEDULE]"""

import sys

import torch
import torch.distributed as dist

from evenpipe.schedule import Size, build, choose
from evenpipe.torch.pipeline import ModulePipeline


def part(position: int) -> torch.nn.Module:
    """The model from its start: called for the parts that the schedule places on this process."""
    torch.manual_seed(position)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())


dist.init_process_group("gloo")
schedule = choose(sys.argv[1] if len(sys.argv) > 1 else "1f1b")  # a name, or file:PATH
program = build(schedule, Size(stages=dist.get_world_size(), micro_batches=8))
pipeline = ModulePipeline(part, program, torch.nn.functional.mse_loss, boundary=torch.empty(4, 64))
optimizer = torch.optim.Adam(pipeline.parameters())
inputs = torch.randn(8 * 4, 64, generator=torch.Generator().manual_seed(0))


def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
    optimizer.zero_grad()
    loss = pipeline.step(inputs, targets)
    optimizer.step()
    return loss


batches = [(inputs, inputs.roll(1, dims=1))] * 5
losses = pipeline.two_bw(batches, optimizer) if schedule.name == "2bw" else (step(*batch) for batch in batches)
for iteration, loss in enumerate(losses):
    if loss is not None:  # where the model ends
        print(f"iteration {iteration}: loss {loss.item():.6f}")
