"""The engines in plain PyTorch: "module", a small transformer, and "planned", a model that a plan cuts."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.partition.models import ModelError, example_of
from evenpipe.partition.search.plan import Plan
from evenpipe.runtime.executor import Observer
from evenpipe.runtime.memory import MemoryCounter
from evenpipe.runtime.precisions import PRECISIONS, autocasting
from evenpipe.schedule import FORWARD, INPUT_GRADIENT, Action
from evenpipe.torch.pipeline import ModulePipeline
from evenpipe.torch.planned import PlannedPipeline
from evenpipe.torch.replicas import groups_of
from evenpipe.torch.two_bw import TwoBWTraining
from evenpipe.train.data import random_batch
from evenpipe.train.engine import Case, Coordinates, OptimizerStep, Tuned, changed_versions
from evenpipe.train.muon import MuonWithAdamW
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.run import digest
from evenpipe.train.transformer import Part, initialised_piece, pieces_of
from evenpipe.tuner.process_memory import KeptBytes

__all__ = [
    "ModuleEngine",
    "PlannedEngine",
    "learning_rate",
    "loss_of",
    "make_optimizer",
    "opened",
    "prepare",
    "squares_of",
]

_FINAL_LR_FRACTION: Final = 0.1


def prepare(device: torch.device) -> None:
    """Nothing has to be done before the first run."""


@contextmanager
def opened(case: Case) -> Iterator[PlainEngine]:
    """The engine of one run; its links are closed unless the run failed, when peers may wait at their other ends."""
    engine = ModuleEngine(case) if case.options.engine == "module" else PlannedEngine(case)
    yield engine
    engine.pipeline.close()


class PlainEngine(Observer, ABC):
    """One stage of one replica in training; fulfils `evenpipe.train.engine.Engine`.

    Who inherits makes `pipeline` and `optimizer`.
    """

    #: Nothing is chosen while training.
    tuned = Tuned()
    pipeline: ModulePipeline | PlannedPipeline
    optimizer: torch.optim.Optimizer
    #: Under a schedule without flushes, once training has begun.
    _training: TwoBWTraining | None = None
    #: Of its steps, what a checkpoint had.
    _saved_steps: dict[str, Any] | None = None

    def __init__(self, case: Case) -> None:
        self._case = case
        self._stepped: OptimizerStep | None = None
        self._first = 0
        groups = groups_of(case.options.stages)
        self.coordinates = Coordinates(case.failure.stage, 0, groups.replica)
        self.replicas, self._pipeline_group = groups.replicas, groups.pipeline

    @abstractmethod
    def batch(self, iteration: int) -> tuple[Any, ...]:
        """Return the arguments of the pipeline's `step` in that iteration."""

    @abstractmethod
    def weights(self) -> dict[tuple[int, int], str]: ...

    def computing(self) -> AbstractContextManager[object]:
        """Entered around the compute of a batch."""
        return nullcontext()

    @property
    def counter(self) -> MemoryCounter:
        return self.pipeline.executor.counter

    def restore(self, state: dict[str, Any]) -> str | None:
        if [list(part.state_dict()) for part in self.pipeline.chunks] != [list(saved) for saved in state["parameters"]]:
            raise OptionsError(
                f"--load {self._case.options.load}: the checkpoint has other parts of the model on stage "
                f"{self.coordinates.stage}: use the --schedule that it was saved with"
            )
        for part, saved in zip(self.pipeline.chunks, state["parameters"], strict=True):
            part.load_state_dict(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self._saved_steps = steps = state.get("steps")
        options = self._case.options
        return changed_versions(steps, options.streams and not options.in_place, options.delay_correction)

    def begin(self, iteration: int) -> None:
        """Under a schedule without flushes batches are read ahead from here on."""
        self._first = iteration
        options = self._case.options
        if options.streams:
            batches = map(self.batch, itertools.count(iteration))
            self._training = self.pipeline.two_bw(
                batches,
                self.optimizer,
                clip_grad=options.clip_grad,
                replicas=self.replicas,
                delay_correction=options.delay_correction,
            )
            self._training.load_state_dict(self._saved_steps)

    def train(self, iteration: int) -> list[float]:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self._case.options, iteration)
        with self.computing():
            if self._training is not None:
                next(self._training)
            else:
                self.optimizer.zero_grad()
                self.pipeline.step(*self.batch(iteration))
        if self._training is None:
            self._step(iteration)
        return [loss.item() for loss in self.pipeline.losses]

    def _step(self, iteration: int) -> None:
        """The optimizer's, on the mean of the replicas' gradients, clipped."""
        self._case.failure.enter("optimizer step")
        self.pipeline.reduce_gradients(self.replicas)
        norm = self.pipeline.clip_grad_norm(self._case.options.clip_grad)
        self.optimizer.step()
        self._stepped = OptimizerStep(iteration, True, norm)

    def drain(self) -> None:
        if self._training is not None:
            self._training.drain()

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

    def kept_bytes(self) -> KeptBytes:
        return self.pipeline.kept_bytes(self.optimizer)

    def state(self) -> dict[str, Any]:
        return {
            "parameters": [part.state_dict() for part in self.pipeline.chunks],
            "optimizer": self.optimizer.state_dict(),
            **({} if self._training is None else {"steps": self._training.state_dict()}),
        }

    def started(self, action: Action) -> None:
        self._case.recorder.started(action)

    def ended(self, action: Action) -> None:
        self._case.recorder.ended(action)
        if action.kind in (FORWARD, INPUT_GRADIENT):
            self._case.recorder.saved(action, self.pipeline.executor.store.nbytes(action.unit))


class ModuleEngine(PlainEngine):
    """One stage of a small transformer."""

    pipeline: _PiecePipeline

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        options = case.options
        parts, dtype = options.stages * options.plan.chunks, PRECISIONS[options.precision]

        def part(position: int) -> nn.Module:
            pieces = pieces_of(options, position, parts)
            numbered = {number: initialised_piece(options, case.corpus.vocabulary, number) for number in pieces}
            return Part(numbered, dtype).to(case.device)

        shape = (options.micro_batch_size, options.seq_length, options.hidden)
        boundary = torch.empty(shape, dtype=dtype, device=case.device)
        self.pipeline = _PiecePipeline(
            part, options.program, loss_of, boundary, self._pipeline_group, self, measure=True
        )
        self.pipeline.pieces = options.layers + 2
        ends = [
            parameter
            for number, piece in self.pipeline.numbered()
            if number in (0, options.layers + 1)
            for parameter in piece.parameters()
        ]
        self.optimizer = make_optimizer(options, self.pipeline.parameters(), ends)

    def batch(self, iteration: int) -> tuple[list[Any], list[Any]]:
        found = [
            [torch.from_numpy(array).to(self._case.device) for array in each]
            for each in self._case.corpus.micro_batches(iteration, self.coordinates.replica)
        ]
        return [tokens for tokens, *_ in found], [target for _, *target in found]

    def weights(self) -> dict[tuple[int, int], str]:
        return {(number, 0): digest([piece]) for number, piece in self.pipeline.numbered()}


class _PiecePipeline(ModulePipeline):
    """Its gradients' squares are summed by piece of the model: how that is cut changes no bit of the norm."""

    #: Of the whole model.
    pieces: int

    def numbered(self) -> Iterator[tuple[int, nn.Module]]:
        """The pieces here, with their number in the whole model."""
        return (numbered for part in self.chunks if isinstance(part, Part) for numbered in part.numbered())

    def squares(self) -> Tensor:
        sums = torch.zeros(self.pieces, dtype=torch.float64, device=self.device)
        for number, piece in self.numbered():
            sums[number] = squares_of(piece)
        return sums


class PlannedEngine(PlainEngine):
    """One stage of a model that a plan cuts, on random data."""

    pipeline: PlannedPipeline

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

    def begin(self, iteration: int) -> None:
        replicas, replica = self._case.options.data_parallel, self.coordinates.replica
        self.pipeline.batches, self.pipeline.stride = iteration * replicas + replica, replicas
        super().begin(iteration)

    def batch(self, iteration: int) -> tuple[dict[str, Tensor]]:
        case, options = self._case, self._case.options
        drawn = random_batch(self._inputs, options.micro_batches, options.seed, iteration, self.coordinates.replica)
        return ({name: values.to(case.device) for name, values in drawn.items()},)

    def computing(self) -> AbstractContextManager[object]:
        return autocasting(self._case.device.type, PRECISIONS.get(self.pipeline.plan.origin.autocast or ""))

    def weights(self) -> dict[tuple[int, int], str]:
        """Return a digest of every parameter by itself, in the model's order, so that how it is cut changes nothing."""
        return {(number, 0): digest([nn.ParameterList([one])]) for number, one in self.pipeline.numbered()}


def loss_of(logits: Tensor, target: Sequence[Tensor]) -> Tensor:
    """The mean cross entropy of the positions that count; `target` are labels and what counts, see `MicroBatch`."""
    labels, counted = target
    losses = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * counted.flatten()).sum() / counted.sum()


def squares_of(piece: nn.Module) -> Tensor:
    """Return the sum of squares of a piece's gradients, in fp64."""
    gradients = [parameter.grad for parameter in piece.parameters() if parameter.grad is not None]
    sums = [gradient.double().square().sum() for gradient in gradients]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)


def make_optimizer(
    options: TrainOptions, parameters: Iterable[nn.Parameter], ends: Iterable[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """AdamW, SGD or Muon of torch; matrices decay, vectors and biases do not.

    Muon has the matrices but those at the model's `ends`, embeddings and the output layer, and AdamW has the rest.
    """
    every = list(parameters)
    if options.optimizer == "muon":
        at_ends = {id(one) for one in ends}
        matrices = [one for one in every if one.dim() == 2 and id(one) not in at_ends]
        by_muon = {id(one) for one in matrices}
        every = [one for one in every if id(one) not in by_muon]
    groups = [
        {"params": [one for one in every if one.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [one for one in every if one.dim() == 1], "weight_decay": 0.0},
    ]
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum)
    if options.optimizer == "muon":
        return MuonWithAdamW(matrices, groups, options.lr, options.weight_decay)
    return torch.optim.AdamW(groups, lr=options.lr)


def learning_rate(options: TrainOptions, iteration: int) -> float:
    """Return the learning rate of `iteration`, counted from 0.

    It rises over the warm-up, then is constant, or falls as a cosine to a tenth.
    """
    done = iteration + 1
    if done <= options.lr_warmup:
        return options.lr * done / options.lr_warmup
    if options.lr_decay == "none":
        return options.lr
    least = _FINAL_LR_FRACTION * options.lr
    gone = (done - options.lr_warmup) / (options.iterations - options.lr_warmup)
    return least + 0.5 * (math.cos(math.pi * gone) + 1.0) * (options.lr - least)
