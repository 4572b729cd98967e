"""A ModulePipeline of one stage: what it gives, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from evenpipe.schedule import Size, build
from evenpipe.torch.pipeline import ModulePipeline

MICRO_BATCHES = 3


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[ModulePipeline]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield made(1)
    finally:
        dist.destroy_process_group()


def made(stages: int, schedule: str = "1f1b") -> ModulePipeline:
    def part(position: int) -> torch.nn.Module:
        torch.manual_seed(position)
        return torch.nn.Linear(4, 4)

    program = build(schedule, Size(stages, MICRO_BATCHES))
    return ModulePipeline(part, program, torch.nn.functional.mse_loss, boundary=torch.empty(2, 4))


def test_the_loss_is_the_mean_and_gradients_are_added_up(pipeline: ModulePipeline) -> None:
    inputs = torch.randn(2 * MICRO_BATCHES, 4, generator=torch.Generator().manual_seed(0))
    loss = pipeline.step(inputs, inputs)
    [module] = pipeline.chunks
    once = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    whole = torch.nn.functional.mse_loss(module(inputs), inputs)
    whole.backward()
    torch.testing.assert_close(loss, whole.detach())
    for parameter, gradient in zip(module.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    pipeline.step(list(inputs.chunk(MICRO_BATCHES)), list(inputs.chunk(MICRO_BATCHES)))
    for parameter, gradient in zip(module.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)


def test_what_cannot_be_shared_out_is_refused(pipeline: ModulePipeline) -> None:
    with pytest.raises(ValueError, match="inputs: 4 samples cannot be shared out to 3 micro-batches"):
        pipeline.step(torch.empty(4, 4), torch.empty(6, 4))
    with pytest.raises(ValueError, match="targets: 2 entries for 3 micro-batches: give one for each"):
        pipeline.step(torch.empty(6, 4), [torch.empty(2, 4)] * 2)


def test_a_schedule_without_flushes_is_iterated_over_and_others_are_not(pipeline: ModulePipeline) -> None:
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="program: 1f1b flushes after every batch: call step"):
        pipeline.two_bw([], optimizer)
    streamed, inputs = made(1, "2bw"), torch.ones(6, 4)
    with pytest.raises(ValueError, match=r"program: 2bw does not flush .*: iterate over two_bw\(batches, optimizer\)"):
        streamed.step(inputs, inputs)


def test_a_program_for_other_stages_is_refused(pipeline: ModulePipeline) -> None:
    with pytest.raises(ValueError, match="program: is for 2 stages, but the group has 1 ranks"):
        made(2)


def weights_after(*rows: list[int], rate: float | torch.Tensor = 0.1) -> list[torch.Tensor]:
    """Of a stage that trains under 2bw on so many of a row's batches, one row after the other; a rate that falls."""
    streamed = made(1, "2bw")
    optimizer = torch.optim.SGD(streamed.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for batches, trained in rows:
        inputs = [torch.full((6, 4), float(number)) for number in range(1, batches + 1)]
        training = streamed.two_bw([(one, 1 - one) for one in inputs], optimizer)
        for number, _ in enumerate(training, 1):
            scheduler.step()
            if number == trained:
                break
    training.drain()
    return [one.detach().clone() for one in streamed.parameters()]


def test_a_loop_that_was_left_early_has_made_its_steps_when_another_begins(pipeline: ModulePipeline) -> None:
    for left, whole in zip(weights_after([3, 2], [3, 3]), weights_after([2, 2], [3, 3]), strict=True):
        assert torch.equal(left, whole)


def test_a_rate_that_is_a_tensor_is_that_of_its_own_batch(pipeline: ModulePipeline) -> None:
    for one, other in zip(weights_after([3, 3]), weights_after([3, 3], rate=torch.tensor(0.1)), strict=True):
        torch.testing.assert_close(one, other)
