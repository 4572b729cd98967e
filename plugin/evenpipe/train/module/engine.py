"""The engine "module": plain `nn.Module`s, torch's own optimizers, and EvenPipe's executor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.runtime.precisions import PRECISIONS
from evenpipe.torch.pipeline import ModulePipeline
from evenpipe.torch.two_bw import scaled_to
from evenpipe.train.data import MicroBatch
from evenpipe.train.engine import Case
from evenpipe.train.gather import digest
from evenpipe.train.module.model import Part, initialised_piece, pieces_of
from evenpipe.train.plain import PlainEngine, make_optimizer

__all__ = ["ModuleEngine", "clip", "loss_of", "opened", "prepare", "squares"]


def prepare(device: torch.device) -> None:
    """Nothing has to be done before the first run."""


@contextmanager
def opened(case: Case) -> Iterator[ModuleEngine]:
    """The engine of one run; its links are closed unless the run failed, when peers may wait at their other ends."""
    engine = ModuleEngine(case)
    yield engine
    engine.pipeline.close()


class ModuleEngine(PlainEngine[ModulePipeline]):
    """One stage of one replica in training; fulfils `evenpipe.train.engine.Engine`."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        options = case.options
        parts, dtype = options.stages * options.plan.chunks, PRECISIONS[options.precision]

        def part(position: int) -> nn.Module:
            pieces = pieces_of(options, position, parts)
            numbered = {number: initialised_piece(options, case.corpus.vocabulary, number) for number in pieces}
            return Part(numbered, dtype).to(case.device)

        boundary = torch.empty(
            options.micro_batch_size, options.seq_length, options.hidden, dtype=dtype, device=case.device
        )
        group = self._pipeline_group
        self.pipeline = ModulePipeline(part, options.program, loss_of, boundary, group, self, measure=True)
        self._parts = [chunk for chunk in self.pipeline.chunks if isinstance(chunk, Part)]
        self.optimizer = make_optimizer(options, self.pipeline.parameters())

    def train(self, iteration: int) -> list[float]:
        case = self._case
        if case.options.streams:
            return self._train_two_bw(iteration)
        self.optimizer.zero_grad()
        self.pipeline.step(*self.batch(iteration))
        case.failure.enter("optimizer step")
        self._reduce()
        self._step(iteration, clip(self.pipeline.gradients, self._all_squares(), case.options.clip_grad))
        return [loss.item() for loss in self.pipeline.losses]

    def batch(self, iteration: int) -> tuple[list[Any], list[Any]]:
        case = self._case
        found = [_on(case.device, each) for each in case.corpus.micro_batches(iteration, self.coordinates.replica)]
        return [tokens for tokens, *_ in found], [target for _, *target in found]

    def weights(self) -> dict[tuple[int, int], str]:
        return {(number, 0): digest([piece]) for part in self._parts for number, piece in part.numbered()}

    def squares(self) -> Tensor:
        found = torch.zeros(self._case.options.layers + 2, dtype=torch.float64, device=self._case.device)
        for part in self._parts:
            for number, piece in part.numbered():
                found[number] = squares(piece)
        return found

    def _all_squares(self) -> list[float]:
        """The sum of squares of the gradients of each piece of the model, of all stages."""
        found = self.squares()
        # Each piece is on one stage: whatever order the sum is made in, it is exact.
        dist.all_reduce(found, group=self._pipeline_group)
        return found.tolist()


def loss_of(logits: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross entropy of the positions that count; `target` are labels and what counts, see `MicroBatch`."""
    labels, counted = target
    losses = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * counted.flatten()).sum() / counted.sum()


def squares(piece: nn.Module) -> Tensor:
    """The sum of squares of a piece's gradients, in fp64."""
    gradients = [parameter.grad for parameter in piece.parameters() if parameter.grad is not None]
    sums = [gradient.double().square().sum() for gradient in gradients]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)


def clip(gradients: Iterable[Tensor], squares: Iterable[float], limit: float) -> float:
    """Scale `gradients` so that the norm of all, whose sums of `squares` by piece are given, is at most `limit`.

    Returns the norm before. 0 does not clip. The order of the pieces is the model's: how it is cut changes no bit.
    """
    norm = math.sqrt(sum(squares))
    scaled_to(limit, norm, list(gradients))
    return norm


def _on(device: torch.device, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    tokens, labels, counted = (torch.from_numpy(array).to(device) for array in batch)
    return tokens, labels, counted
