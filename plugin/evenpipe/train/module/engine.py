"""The engine "module": plain `nn.Module`s, torch's own optimizers, and EvenPipe's executor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.runtime.counters import MemoryCounter
from evenpipe.runtime.executor import Observer
from evenpipe.schedule import FORWARD, Action
from evenpipe.train.data import MicroBatch
from evenpipe.train.engine import Case, Coordinates, KeptBytes, OptimizerStep, Tuned
from evenpipe.train.gather import digest
from evenpipe.train.module.model import Part, initialised_piece, pieces_of
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.pipeline import ModulePipeline
from evenpipe.tuner.process_memory import static_bytes

__all__ = ["ModuleEngine", "clip", "learning_rate", "loss_of", "make_optimizer", "opened", "prepare", "squares"]

_FINAL_LR_FRACTION: Final = 0.1
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}


def prepare(device: torch.device) -> None:
    """Nothing has to be done before the first run."""


@contextmanager
def opened(case: Case) -> Iterator[ModuleEngine]:
    """The engine of one run; its links are closed unless the run failed, when peers may wait at their other ends."""
    engine = ModuleEngine(case)
    yield engine
    engine.pipeline.close()


class ModuleEngine(Observer):
    """One stage of one replica in training; fulfils `evenpipe.train.engine.Engine`."""

    #: Every batch ends with nothing under way, and nothing is chosen while training.
    versions_peak = 1
    tuned = Tuned()

    def __init__(self, case: Case) -> None:
        options = case.options
        self._case = case
        self.finished: OptimizerStep | None = None
        self.coordinates = Coordinates(case.failure.stage, 0, dist.get_rank() % options.data_parallel)
        self.replicas, pipeline = _groups(options)
        parts, dtype = options.stages * options.plan.chunks, _DTYPES[options.precision]

        def part(position: int) -> nn.Module:
            pieces = pieces_of(options, position, parts)
            made = Part(
                {number: initialised_piece(options, case.corpus.vocabulary, number) for number in pieces}, dtype
            )
            made.to(case.device).register_forward_hook(self._spoiled)
            return made

        boundary = torch.empty(
            options.micro_batch_size, options.seq_length, options.hidden, dtype=dtype, device=case.device
        )
        self._pipeline_group = pipeline
        self.pipeline = ModulePipeline(part, options.program, loss_of, boundary, pipeline, self, measure=True)
        self._parts = [chunk for chunk in self.pipeline.chunks if isinstance(chunk, Part)]
        self.optimizer = make_optimizer(options, self.pipeline.parameters())

    @property
    def counter(self) -> MemoryCounter:
        return self.pipeline.executor.counter

    def restore(self, state: dict[str, Any]) -> str | None:
        if [list(part.state_dict()) for part in self._parts] != [list(saved) for saved in state["parameters"]]:
            raise OptionsError(
                f"--load {self._case.options.load}: the checkpoint has other parts of the model on stage "
                f"{self.coordinates.stage}: use the --schedule that it was saved with"
            )
        for part, saved in zip(self._parts, state["parameters"], strict=True):
            part.load_state_dict(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        return None

    def begin(self, iteration: int) -> None:
        """Nothing depends on it."""

    def start_batch(self) -> None:
        """Nothing is to be done."""

    def train(self, iteration: int) -> list[float]:
        case, replica = self._case, self.coordinates.replica
        batch = [_on(case.device, each) for each in case.corpus.micro_batches(iteration, replica)]
        self.optimizer.zero_grad()
        self.pipeline.step([tokens for tokens, *_ in batch], [target for _, *target in batch])
        case.failure.enter("optimizer step")
        self._reduce()
        norm = clip(self._gradients(), self._all_squares(), case.options.clip_grad)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(case.options, iteration)
        self.optimizer.step()
        self.finished = OptimizerStep(iteration, True, norm)
        return [loss.item() for loss in self.pipeline.losses]

    def drain(self) -> None:
        """Nothing is under way."""

    def kept_bytes(self) -> KeptBytes:
        parameters = list(self.pipeline.parameters())
        # Counters of steps are numbers, in tensors of no dimension.
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        kept = [value for value in state if torch.is_tensor(value) and value.dim()]
        static = static_bytes([*parameters, *self._gradients(), *kept], [self.optimizer])
        return KeptBytes(sum(parameter.nbytes for parameter in parameters), 0, 0, static)

    def weights(self) -> dict[tuple[int, int], str]:
        return {(number, 0): digest([piece]) for part in self._parts for number, piece in part.numbered()}

    def state(self) -> dict[str, Any]:
        return {
            "parameters": [part.state_dict() for part in self._parts],
            "optimizer": self.optimizer.state_dict(),
        }

    def started(self, action: Action) -> None:
        self._case.recorder.started(action)

    def ended(self, action: Action) -> None:
        self._case.recorder.ended(action)
        if action.kind == FORWARD:
            self._case.recorder.saved(action, self.pipeline.executor.store.nbytes(action.unit))

    def _spoiled(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return output * math.nan if self._case.failure.spoils_output else output

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.pipeline.parameters() if parameter.grad is not None]

    def _reduce(self) -> None:
        """The mean of the replicas' gradients."""
        if self.replicas.size() > 1:
            for gradient in self._gradients():
                dist.all_reduce(gradient, group=self.replicas)
                gradient.div_(self.replicas.size())

    def _all_squares(self) -> list[float]:
        """The sum of squares of the gradients of each piece of the model, of all stages."""
        found = torch.zeros(self._case.options.layers + 2, dtype=torch.float64, device=self._case.device)
        for part in self._parts:
            for number, piece in part.numbered():
                found[number] = squares(piece)
        # Each piece is on one stage: whatever order the sum is made in, it is exact.
        dist.all_reduce(found, group=self._pipeline_group)
        return found.tolist()


def loss_of(logits: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross entropy of the positions that count; `target` are labels and what counts, see `MicroBatch`."""
    labels, counted = target
    losses = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * counted.flatten()).sum() / counted.sum()


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


def squares(piece: nn.Module) -> Tensor:
    """The sum of squares of a piece's gradients, in fp64."""
    gradients = [parameter.grad for parameter in piece.parameters() if parameter.grad is not None]
    return torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()


def clip(gradients: Iterable[Tensor], squares: Iterable[float], limit: float) -> float:
    """Scale `gradients` so that the norm of all, whose sums of `squares` by piece are given, is at most `limit`.

    Returns the norm before. 0 does not clip. The order of the pieces is the model's: how it is cut changes no bit.
    """
    norm = math.sqrt(sum(squares))
    if limit and norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / (norm + 1e-6))
    return norm


def _groups(options: TrainOptions) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This process' data-parallel group and its pipeline; all processes make all groups alike."""
    width, stages = options.data_parallel, range(options.stages)
    enumerated: Any = dist.new_subgroups_by_enumeration
    replicas, _ = enumerated([[stage * width + n for n in range(width)] for stage in stages])
    pipeline, _ = enumerated([[stage * width + n for stage in stages] for n in range(width)])
    return replicas, pipeline


def _on(device: torch.device, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    tokens, labels, counted = (torch.from_numpy(array).to(device) for array in batch)
    return tokens, labels, counted
