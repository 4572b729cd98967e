"""A ModulePipeline of one stage: what it gives, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evenpipe.runtime.weight_versions import WeightVersions
from evenpipe.schedule import Size, build, find
from evenpipe.torch.pipeline import ModulePipeline
from evenpipe.torch.ties import Ties
from evenpipe.torch.two_bw import PlainGradients
from evenpipe.two_bw.stream import TwoBW

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


class Rebinding(torch.optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                one.data = one.data - 0.1 * one.grad


def test_an_optimizer_that_needs_more_than_gradients_is_refused_by_what_it_needs(pipeline: ModulePipeline) -> None:
    streamed = made(1, "2bw")
    with pytest.raises(ValueError, match=r"^2bw: LBFGS\.step needs a closure, .*: use an optimizer that steps without"):
        streamed.two_bw([], torch.optim.LBFGS(streamed.parameters()))
    batch = torch.ones(6, 4), torch.ones(6, 4)
    with pytest.raises(RuntimeError, match=r"^2bw: the optimizer has given a parameter other memory"):
        [*streamed.two_bw([batch, batch], Rebinding(streamed.parameters(), lr=0.1))]
    hooked = made(1, "2bw")
    for one in hooked.parameters():
        one.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match=r"^2bw: a parameter of SGD has hooks that run after each"):
        hooked.two_bw([], torch.optim.SGD(hooked.parameters(), lr=0.1))


def test_several_optimizers_step_as_one(pipeline: ModulePipeline) -> None:
    weights = []
    for several in (False, True):
        streamed = made(1, "2bw")
        every = [*streamed.parameters()]
        kinds = [every[:1], every[1:]] if several else [every]
        inputs = [torch.full((6, 4), float(number)) for number in range(1, 4)]
        list(streamed.two_bw([(one, 1 - one) for one in inputs], [torch.optim.AdamW(some) for some in kinds]))
        weights.append([one.detach().clone() for one in every])
    assert all(map(torch.equal, *weights))


def test_gradients_are_clipped_to_the_norm_of_all_and_zero_clips_nothing(pipeline: ModulePipeline) -> None:
    inputs = torch.randn(2 * MICRO_BATCHES, 4, generator=torch.Generator().manual_seed(0))
    pipeline.step(inputs, inputs)
    norm = torch.cat([gradient.flatten() for gradient in pipeline.gradients]).norm().item()
    assert pipeline.clip_grad_norm(0.0) == pytest.approx(norm)
    assert pipeline.clip_grad_norm(norm / 2) == pytest.approx(norm)
    assert pipeline.clip_grad_norm(norm) == pytest.approx(norm / 2, rel=1e-4)


class Shared(Ties):
    """Shared gradients, of which each is the sum of two alike; `told` says what was asked for."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self._given: list[Tensor] = []

    def fill(self) -> None:
        self.told.append("fill")

    def start(self, gradients: Mapping[int, Tensor]) -> None:
        self.told.append("start")
        self._given = [*gradients.values()]

    def finish(self) -> None:
        self.told.append("finish")
        for gradient in self._given:
            gradient.mul_(2)
        self._given = []

    def __bool__(self) -> bool:
        return True


def test_shared_gradients_are_sent_where_all_stages_gather_and_not_where_this_one_submits(
    pipeline: ModulePipeline,
) -> None:
    """The last stage submits before the first has ended its batch, and would hold up what that needs of it."""
    weight, shared, alone = torch.nn.Parameter(torch.ones(3)), Shared(), dist.group.WORLD
    assert alone is not None

    def squares() -> Tensor:
        zero = torch.zeros(1, dtype=torch.float64)
        return zero if weight.grad is None else weight.grad.double().square().sum().view(1)

    optimizer = torch.optim.SGD([weight], lr=1.0)
    gradients = PlainGradients(WeightVersions([weight]), [optimizer], squares, alone, ties=shared)
    two_bw = TwoBW(gradients, find("2bw"), bpipe=False)
    weight.grad = torch.full((3,), 0.25)
    two_bw.submit()
    assert shared.told == ["fill"]
    two_bw.gather()
    assert shared.told == ["fill", "start", "finish"]
    two_bw.update()
    assert shared.told == ["fill", "start", "finish"]
    assert weight.tolist() == [0.5] * 3
    assert two_bw.submit().grad_norm == pytest.approx(3**0.5 / 2)
