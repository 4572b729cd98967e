"""A stage alone, under real autograd: what it saves, what its micro-batches share, and what it is given by nobody."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from evenpipe.runtime.connections import Connections
from evenpipe.runtime.executor import Executor
from evenpipe.schedule import FORWARD, Kind, Schedule, Unit
from evenpipe.tuner.dry_run import DryRun
from evenpipe.tuner.group_memory import Measured

STAGES = 3
CPU = torch.device("cpu")
MASK = torch.rand(8)


class Masked:
    """exp(weight · input · mask): autograd saves the mask, which all share, the input and the output."""

    def __init__(self, samples: Callable[[Unit], int]) -> None:
        self.weight = torch.ones(8, requires_grad=True)
        self.samples = samples
        self.log: list[tuple[str, Unit, bool]] = []
        self._outputs: dict[Unit, Tensor] = {}

    def receive_buffers(self, kind: Kind, unit: Unit) -> list[Tensor]:
        return [torch.full((self.samples(unit), 8), torch.nan, requires_grad=kind == FORWARD)]

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        self.log.append(("F", unit, inputs is None))
        [given] = self.receive_buffers(FORWARD, unit) if inputs is None else inputs
        assert inputs is None or given.isfinite().all()
        self._outputs[unit] = (given * self.weight * MASK).exp()
        return [self._outputs[unit].detach()]

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        self.log.append(("B", unit, gradients is None))
        output = self._outputs.pop(unit)
        output.backward(torch.ones_like(output) if gradients is None else gradients[0])
        return []


def dry_run(*stages: Masked, index: int = 1, fits: Callable[[int], bool] = lambda nbytes: True) -> DryRun:
    """Of one stage, whose micro-batches are of a size, then of another."""
    weights = [stage.weight for stage in stages]
    return DryRun(Executor(index, Connections({}, {}), CPU), STAGES, weights, fits)


def measured(of: DryRun, stage: Masked, different: int = 0) -> Measured:
    return of.measured(lambda schedule: stage, workspace=lambda: 7, different=different)


def test_two_at_a_time_show_what_all_share() -> None:
    stage = Masked(lambda unit: 2)
    found = measured(dry_run(stage), stage)
    assert (found.each_bytes, found.shared_bytes) == (2 * 2 * 8 * 4, MASK.nbytes)
    assert (found.message_bytes, found.workspace_bytes, found.static_bytes) == (64, 7, 0)
    assert found.forward_ms > 0
    assert found.backward_ms > 0
    assert [kind for kind, *_ in stage.log] == [*"FFBB", *"FB" * 4]


def test_where_two_do_not_fit_nothing_is_taken_to_be_shared() -> None:
    stage, asked = Masked(lambda unit: 2), []

    def fits(nbytes: int) -> bool:
        asked.append(nbytes)
        return False

    found = measured(dry_run(stage, fits=fits), stage)
    assert (found.each_bytes, found.shared_bytes) == (2 * 2 * 8 * 4 + MASK.nbytes, 0)
    assert asked == [2 * found.each_bytes]
    assert [kind for kind, *_ in stage.log] == [*"FB", *"FB" * 4]


def test_another_size_needs_one_and_shares_as_much() -> None:
    small, large = Masked(lambda unit: 1), Masked(lambda unit: 4)
    of = dry_run(small, large)
    first, second = measured(of, small), measured(of, large)
    assert second.shared_bytes == first.shared_bytes == MASK.nbytes
    assert second.each_bytes == 4 * first.each_bytes
    assert [kind for kind, *_ in large.log] == [*"FB" * 5]


def test_of_micro_batches_that_differ_the_largest_counts() -> None:
    """All of a batch are weighed, and as many timed."""
    stage = Masked(lambda unit: 1 + unit.micro_batch % 5)
    found = measured(dry_run(stage), stage, different=5)
    assert (found.each_bytes, found.shared_bytes) == (2 * 5 * 8 * 4 + MASK.nbytes, 0)
    assert found.message_bytes == 5 * 8 * 4
    assert [kind for kind, *_ in stage.log] == [*"FB" * 10]


@pytest.mark.parametrize("index", range(STAGES))
def test_nothing_is_made_up_for_the_ends_of_the_model(index: int) -> None:
    """And nothing of the last micro-batch of its schedule, with which replicas would begin to reduce gradients."""
    stage = Masked(lambda unit: 1)
    made: list[Schedule] = []

    def make(schedule: Schedule) -> Masked:
        made.append(schedule)
        return stage

    dry_run(stage, index=index).measured(make, lambda: 0)
    assert {alone for kind, _, alone in stage.log if kind == "F"} == {index == 0}
    assert {alone for kind, _, alone in stage.log if kind == "B"} == {index == STAGES - 1}
    assert max(unit.micro_batch for _, unit, _ in stage.log) == made[0].micro_batches - 2
