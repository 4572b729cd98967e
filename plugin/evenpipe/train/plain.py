"""What engines in plain PyTorch have in common: torch's own optimizers, replicas, and what is told of every action."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.runtime.executor import Observer
from evenpipe.runtime.heartbeat import job_timeout
from evenpipe.runtime.memory import MemoryCounter
from evenpipe.schedule import FORWARD, Action
from evenpipe.torch.pipeline import Pipeline
from evenpipe.torch.two_bw import TwoBWTraining
from evenpipe.train.engine import Case, Coordinates, OptimizerStep, Tuned
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.tuner.process_memory import KeptBytes

__all__ = ["PlainEngine", "learning_rate", "make_optimizer"]

_FINAL_LR_FRACTION: Final = 0.1


PipelineT = TypeVar("PipelineT", bound=Pipeline)


class PlainEngine(Observer, ABC, Generic[PipelineT]):
    """One stage of one replica in training: most of what `evenpipe.train.engine.Engine` asks for.

    Who inherits makes `pipeline` and `optimizer`.
    """

    #: Nothing is chosen while training.
    tuned = Tuned()
    pipeline: PipelineT
    optimizer: torch.optim.Optimizer
    #: Under a schedule without flushes, once training has begun.
    _training: TwoBWTraining | None = None
    #: Of its steps, what a checkpoint had.
    _saved_steps: dict[str, Any] | None = None

    def __init__(self, case: Case) -> None:
        self._case = case
        self._stepped: OptimizerStep | None = None
        self._first = 0
        self.coordinates = Coordinates(case.failure.stage, 0, dist.get_rank() % case.options.data_parallel)
        self.replicas, self._pipeline_group = _groups(case.options)

    @property
    def counter(self) -> MemoryCounter:
        return self.pipeline.executor.counter

    def restore(self, state: dict[str, Any]) -> str | None:
        if [list(part.state_dict()) for part in self.parts] != [list(saved) for saved in state["parameters"]]:
            raise OptionsError(
                f"--load {self._case.options.load}: the checkpoint has other parts of the model on stage "
                f"{self.coordinates.stage}: use the --schedule that it was saved with"
            )
        for part, saved in zip(self.parts, state["parameters"], strict=True):
            part.load_state_dict(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self._saved_steps = state.get("steps")
        if (self._saved_steps is not None) == self._case.options.streams:
            return None
        if self._saved_steps is not None:
            return "the checkpoint has two versions of the weights: this run goes on from the newer one"
        return "the checkpoint has one version of the weights: both versions of this run start from it"

    def begin(self, iteration: int) -> None:
        """Under a schedule without flushes batches are read ahead from here on."""
        self._first = iteration
        options = self._case.options
        if options.streams:
            self._training = self.pipeline.two_bw(
                map(self.batch, itertools.count(iteration)),
                self.optimizer,
                clip_grad=options.clip_grad,
                replicas=self.replicas,
                squares=self.squares,
            )
            self._training.load_state_dict(self._saved_steps)

    def start_batch(self) -> None:
        """Nothing is to be done."""

    def drain(self) -> None:
        if self._training is not None:
            self._training.drain()

    @abstractmethod
    def batch(self, iteration: int) -> Any:
        """What the pipeline trains on in that iteration."""

    def squares(self) -> Tensor:
        """Sums of squares of this stage's gradients, by piece of the model."""
        return self.pipeline.squares()

    @property
    def finished(self) -> OptimizerStep | None:
        if self._training is None:
            return self._stepped
        if self._training.two_bw.finished is None:
            return None
        batch, late = self._training.two_bw.finished
        return OptimizerStep(self._first + batch, late.updated, late.grad_norm)

    @property
    def versions_peak(self) -> int:
        return 1 if self.pipeline.versions is None else self.pipeline.versions.peak

    def _train_two_bw(self, iteration: int) -> list[float]:
        """An iteration of a schedule without flushes."""
        assert self._training is not None, "training has begun"
        self._set_rate(iteration)
        next(self._training)
        return [loss.item() for loss in self.pipeline.losses]

    def kept_bytes(self) -> KeptBytes:
        return self.pipeline.kept_bytes(self.optimizer)

    def state(self) -> dict[str, Any]:
        return {
            "parameters": [part.state_dict() for part in self.parts],
            "optimizer": self.optimizer.state_dict(),
            **({} if self._training is None else {"steps": self._training.two_bw.state_dict()}),
        }

    def started(self, action: Action) -> None:
        self._case.recorder.started(action)

    def ended(self, action: Action) -> None:
        self._case.recorder.ended(action)
        if action.kind == FORWARD:
            self._case.recorder.saved(action, self.pipeline.executor.store.nbytes(action.unit))

    @property
    def parts(self) -> Sequence[nn.Module]:
        """Those of the model that are here."""
        return self.pipeline.chunks

    def _reduce(self) -> None:
        """The mean of the replicas' gradients."""
        if self.replicas.size() > 1:
            for gradient in self.pipeline.gradients:
                dist.all_reduce(gradient, group=self.replicas)
                gradient.div_(self.replicas.size())

    def _step(self, iteration: int, norm: float) -> None:
        """The optimizer's, whose gradients' norm before clipping is given."""
        self._set_rate(iteration)
        self.optimizer.step()
        self._stepped = OptimizerStep(iteration, True, norm)

    def _set_rate(self, iteration: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self._case.options, iteration)


def make_optimizer(options: TrainOptions, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW or SGD of torch; matrices decay, vectors and biases do not."""
    every = list(parameters)
    groups = [
        {"params": [one for one in every if one.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [one for one in every if one.dim() == 1], "weight_decay": 0.0},
    ]
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum)
    return torch.optim.AdamW(groups, lr=options.lr)


def learning_rate(options: TrainOptions, iteration: int) -> float:
    """Of `iteration`, counted from 0: rises over the warm-up, then is constant, or falls as a cosine to a tenth."""
    done = iteration + 1
    if done <= options.lr_warmup:
        return options.lr * done / options.lr_warmup
    if options.lr_decay == "none":
        return options.lr
    least = _FINAL_LR_FRACTION * options.lr
    gone = (done - options.lr_warmup) / (options.iterations - options.lr_warmup)
    return least + 0.5 * (math.cos(math.pi * gone) + 1.0) * (options.lr - least)


def _groups(options: TrainOptions) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This process' data-parallel group and its pipeline; all processes make all groups alike."""
    width, stages = options.data_parallel, range(options.stages)
    enumerated: Any = dist.new_subgroups_by_enumeration
    replicas, _ = enumerated([[stage * width + n for n in range(width)] for stage in stages], timeout=job_timeout())
    pipeline, _ = enumerated([[stage * width + n for stage in stages] for n in range(width)], timeout=job_timeout())
    return replicas, pipeline
