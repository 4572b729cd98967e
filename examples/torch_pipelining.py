"""plain_torch.py by torch.distributed.pipelining: torchrun --nproc-per-node 4 examples/torch_pipelining.py"""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def part(position: int) -> torch.nn.Module:
    """The model from its start."""
    torch.manual_seed(position)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())


dist.init_process_group("gloo")
rank, stages = dist.get_rank(), dist.get_world_size()
module = part(rank)
stage = PipelineStage(module, rank, stages, torch.device("cpu"))
pipeline = Schedule1F1B(stage, n_microbatches=8, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.Adam(module.parameters())
inputs = torch.randn(8 * 4, 64, generator=torch.Generator().manual_seed(0))


def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
    optimizer.zero_grad()
    losses: list[torch.Tensor] = []
    pipeline.step(*([inputs] if rank == 0 else []), target=targets if rank == stages - 1 else None, losses=losses)
    squares = sum(one.grad.double().square().sum() for one in module.parameters())
    dist.all_reduce(squares)
    for one in module.parameters():  # as torch.nn.utils.clip_grad_norm_ does it in one process
        one.grad.mul_((1.0 / (squares.sqrt() + 1e-6)).clamp(max=1.0))
    optimizer.step()
    return torch.stack(losses).mean() if losses else None


batches = [(inputs, inputs.roll(1, dims=1))] * 5
for iteration, batch in enumerate(batches):
    loss = step(*batch)
    if loss is not None:  # where the model ends
        print(f"iteration {iteration}: loss {loss.item():.6f}")
