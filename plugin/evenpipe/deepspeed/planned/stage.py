"""A stage's part of a cut model as the one layer that a PipelineModule has there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from evenpipe.deepspeed.section import NAME, SectionError
from evenpipe.partition.search.plan import Plan
from evenpipe.runtime.executor import Executor
from evenpipe.runtime.host_memory import check_hosts
from evenpipe.runtime.recompute_swap import Keeper
from evenpipe.schedule import Action, Unit
from evenpipe.stage_code import Boundary, Draws, Part, sizes_on_host
from evenpipe.upstream.ending import end_job

__all__ = ["INPUTS", "LABELS", "CutStage", "is_label", "jointly", "named"]

#: What an engine's data iterator gives, by the names of `WholeModel.forward`'s arguments.
INPUTS: Final = "inputs"
LABELS: Final = "labels"
_WHOLE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CutStage:
    """Computes what a stage's generated code does; takes the micro-batch's input, or what the stage before sent.

    path: the plan's. types: the parts of all stages. part: this stage's. seed: of random numbers.

    A message is a tuple: what the part sends, then those of the micro-batch's inputs that later stages read, since
    DeepSpeed loads them on the first stage only. DeepSpeed sends gradients back for all floating-point numbers, so what
    has none travels as whole ones, bit by bit. The last stage returns the loss.
    """

    def __init__(self, path: Path, types: Sequence[type[Part]], stage: int, part: Part, seed: int) -> None:
        self.path = path
        self.part = part
        self.types = tuple(types)
        self.plan = Plan.read(path)
        #: Of the micro-batch that is computed next, where the model ends.
        self.labels: Any = None
        self.keeper: Keeper | None = None
        self._unit: Unit | None = None
        self._number = 0
        self._first = stage == 0
        self._last = part.LAST
        self._seed = seed
        self._taken = {} if self._first else _read_from(types[stage:])
        self._passed = _read_from(types[stage + 1 :])

    def check_batch(self, micro_batches: int, micro_batch_size: int) -> None:
        """Raise SectionError for batches that the plan is not for."""
        for option, key, wanted, given in (
            ("--micro-batches", "gradient_accumulation_steps", self.plan.micro_batches, micro_batches),
            (
                "--micro-batch-size",
                "train_micro_batch_size_per_gpu",
                self.plan.origin.micro_batch_size,
                micro_batch_size,
            ),
        ):
            if given != wanted:
                raise SectionError(
                    "partition", f"{self.path}: is for {key} {wanted}, not {given}: make a plan with {option} {given}"
                )

    def check_evaluation(self, asks_for_outputs: bool) -> None:
        """End the job where the code, which is of the model in training, cannot give what is asked for."""
        if asks_for_outputs:
            end_job(
                f"{NAME}.partition: {self.path}: eval_batch(return_logits, compute_loss): a cut model gives its loss: "
                "leave them out"
            )
        if self.differs_in_training:
            end_job(
                f"{NAME}.partition: {self.path}: eval_batch: the code of the stages is that of training, and the model "
                "is another in evaluation (dropout, batch norm): load the checkpoint without a plan"
            )

    def keep_as_planned(self, executor: Executor, row: Sequence[Action]) -> None:
        """Have the stage, which carries out `row`, recompute and swap what its plan chose, if it chose something.

        All ranks call it; ends the job where their hosts lack the memory.
        """
        sizes = sizes_on_host([self.part], row)
        try:
            check_hosts(sizes, None)
        except ValueError as error:
            end_job(f"{NAME}.partition: {self.path}: {error}")
        if self.part.KEEPING.nodes:
            self.keeper = executor.keeper = Keeper(executor.store, executor.device)
            executor.connections.compare(self.keeper.link.named)
            self.keeper.link.memory.reserve(sizes)
            if sizes:
                executor.observer.remark(self.keeper.link.memory.held_line(executor.stage_index))

    @contextmanager
    def training(self, unit: Unit, number: int) -> Iterator[None]:
        """Inside, the micro-batch that is computed is this unit, the number-th of all; others are evaluations."""
        self._unit, self._number = unit, number
        try:
            yield
        finally:
            self._unit = None

    @property
    def differs_in_training(self) -> bool:
        """Return whether the model, as traced in training, draws random numbers or uses averages of its batch."""
        return any(one.RANDOM or any(name.endswith("running_mean") for name in one.STATE) for one in self.types)

    def __call__(self, given: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Return the message to the next stage, or the loss."""
        if self._first:
            inputs, received = named(INPUTS, given), tuple[Tensor, ...]()
            self._check(inputs)
        else:
            tensors = given if isinstance(given, tuple) else (given,)
            count = len(self.part.RECEIVES)
            received = tuple(_as_it_was(*one) for one in zip(tensors, self.part.RECEIVES, strict=False))
            passed = zip(tensors[count:], self._taken.items(), strict=True)
            inputs = {name: tensor.view(dtype) for tensor, (name, dtype) in passed}
        if self._last:
            labels = named(LABELS, self.labels)
            self._check(labels)
            inputs = {**inputs, **labels}
        sent = self._computed(inputs, received)
        if self._last:
            return sent[0]
        passed_on = (_in_whole_numbers(inputs[name]) for name in self._passed)
        return (*(_message(*one) for one in zip(sent, self.part.SENDS, strict=True)), *passed_on)

    def _check(self, given: Mapping[str, Tensor]) -> None:
        """End the job with one line where a micro-batch is not as the plan's."""
        for part in self.types:
            for name, shape, dtype in zip(part.INPUTS, part.INPUT_SHAPES, part.INPUT_DTYPES, strict=True):
                if name not in given:
                    continue
                found = tuple(given[name].shape), given[name].dtype
                if found != (shape, dtype):
                    end_job(
                        f"{NAME}.partition: {self.path}: {name} is {found[0]}, {found[1]}, and the plan is for "
                        f"{shape}, {dtype}: give micro-batches of that shape and type, or make a plan for these"
                    )

    def _computed(self, inputs: Mapping[str, Tensor], received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        draws = Draws(self._seed, self._number)
        if self.keeper is None or self._unit is None:
            return self.part(inputs, draws, *received)
        with self.keeper.forward(self._unit, self.part.KEEPING, draws) as keep:
            return self.part(inputs, draws, *received, keep=keep)


def named(name: str, given: Any) -> dict[str, Tensor]:
    """Tensors by the names that tracing gives the parts of an argument."""
    if isinstance(given, Tensor):
        return {name: given}
    return {f"{name}_{number}": one for number, one in enumerate(given)}


def jointly(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return a scalar with a backward that is one of all `outputs`; DeepSpeed's own is one after the other's."""
    joint: Tensor = _Joint.apply(gradients, *outputs)  # type: ignore[no-untyped-call]
    return joint


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = tuple(gradients)
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (None, *ctx.gradients)


def _read_from(types: Sequence[type[Part]]) -> dict[str, torch.dtype]:
    """Return the micro-batch's inputs that these parts read, and their types, labels apart."""
    found = (one for part in types for one in zip(part.INPUTS, part.INPUT_DTYPES, strict=True))
    return {name: dtype for name, dtype in found if not is_label(name)}


def is_label(name: str) -> bool:
    """Return whether an input of the traced module is a label, or one of several."""
    return name == LABELS or name.startswith(f"{LABELS}_")


def _message(tensor: Tensor, boundary: Boundary) -> Tensor:
    return tensor if boundary.gradient else _in_whole_numbers(tensor)


def _in_whole_numbers(tensor: Tensor) -> Tensor:
    if tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
        return tensor.detach().view(_WHOLE[tensor.dtype.itemsize])
    return tensor


def _as_it_was(tensor: Tensor, boundary: Boundary) -> Tensor:
    return tensor if boundary.gradient else tensor.view(boundary.dtype)
