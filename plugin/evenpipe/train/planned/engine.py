"""The engine "planned": a plain model that a plan cuts, on random data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.partition.models import ModelError, example_of
from evenpipe.partition.search.plan import Plan
from evenpipe.runtime.precisions import PRECISIONS, autocasting
from evenpipe.torch.planned import PlannedPipeline
from evenpipe.train.engine import Case
from evenpipe.train.gather import digest
from evenpipe.train.options import OptionsError
from evenpipe.train.plain import PlainEngine, make_optimizer
from evenpipe.train.planned.data import random_batch

__all__ = ["PlannedEngine", "opened", "prepare"]


def prepare(device: torch.device) -> None:
    """Nothing has to be done before the first run."""


@contextmanager
def opened(case: Case) -> Iterator[PlannedEngine]:
    """The engine of one run; its links are closed unless the run failed, when peers may wait at their other ends."""
    engine = PlannedEngine(case)
    yield engine
    engine.pipeline.close()


class PlannedEngine(PlainEngine[PlannedPipeline]):
    """One stage of one replica in training; fulfils `evenpipe.train.engine.Engine`."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        options = case.options
        assert options.partition is not None, "the options name this engine where there is a plan"
        path = Path(options.partition)
        torch.manual_seed(options.seed)
        try:
            example = example_of(Plan.read(path).origin)
            self.pipeline = PlannedPipeline(
                path,
                example.model,
                device=case.device,
                seed=options.seed,
                group=self._pipeline_group,
                job=dist.group.WORLD,
                observer=self,
                measure=True,
                trust=options.trust,
            )
        except (ModelError, ValueError) as error:
            raise OptionsError(f"--partition {error}") from error
        # Whatever else the model takes, its plan has taken in.
        self._inputs = {name: one for name, one in example.inputs.items() if isinstance(one, Tensor)}
        self.optimizer = make_optimizer(options, self.pipeline.parameters())

    def train(self, iteration: int) -> list[float]:
        case, pipeline, options = self._case, self.pipeline, self._case.options
        with autocasting(case.device.type, PRECISIONS.get(pipeline.plan.origin.autocast or "")):
            if options.streams:
                return self._train_two_bw(iteration)
            self.optimizer.zero_grad()
            pipeline.step(self.batch(iteration))
        case.failure.enter("optimizer step")
        self._reduce()
        self._step(iteration, pipeline.clip_grad_norm(options.clip_grad))
        return [loss.item() for loss in pipeline.losses]

    def begin(self, iteration: int) -> None:
        replicas, replica = self._case.options.data_parallel, self.coordinates.replica
        self.pipeline.batches, self.pipeline.stride = iteration * replicas + replica, replicas
        super().begin(iteration)

    def batch(self, iteration: int) -> dict[str, Tensor]:
        case, options = self._case, self._case.options
        drawn = random_batch(self._inputs, options.micro_batches, options.seed, iteration, self.coordinates.replica)
        return {name: values.to(case.device) for name, values in drawn.items()}

    def weights(self) -> dict[tuple[int, int], str]:
        """Of every parameter by itself, in the model's order, so that how it is cut changes nothing."""
        return {(number, 0): digest([nn.ParameterList([one])]) for number, one in self.pipeline.numbered()}
