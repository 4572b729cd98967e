"""Your own nn.Modules under any schedule: torchrun --nproc-per-node 4 examples/plain_torch.py [SCHEDULE]"""

from argparse import ArgumentParser

import torch
import torch.distributed as dist

from evenpipe.schedule import ScheduleError, Size, build, choose
from evenpipe.torch.pipeline import ModulePipeline


def part(position: int) -> torch.nn.Module:  # called for the parts that the schedule places on this process
    torch.manual_seed(position)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())


def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
    optimizer.zero_grad()
    loss = pipeline.step(inputs, targets)
    pipeline.clip_grad_norm(1.0)
    optimizer.step()
    return loss


parser = ArgumentParser(description=__doc__)
parser.add_argument("schedule", nargs="?", default="1f1b", help="a name, or file:PATH")
try:
    schedule = choose(parser.parse_args().schedule)
except ScheduleError as error:
    parser.exit(2, f"plain_torch.py: {error}\n")
dist.init_process_group("gloo")
pipeline = ModulePipeline(part, build(schedule, Size(dist.get_world_size(), 8)), torch.nn.functional.mse_loss)
optimizer = torch.optim.Adam(pipeline.parameters())
inputs = torch.randn(8 * 4, 64, generator=torch.Generator().manual_seed(0))
batches = [(inputs, inputs.roll(1, dims=1))] * 5
streamed = schedule.name == "2bw"
losses = pipeline.two_bw(batches, optimizer, clip_grad=1.0) if streamed else (step(*batch) for batch in batches)
for iteration, loss in enumerate(losses):
    if loss is not None:  # where the model ends
        print(f"iteration {iteration}: loss {loss.item():.6f}")
