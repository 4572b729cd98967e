"""What the executor needs of one pipeline stage, and the plain `nn.Module` that fulfils it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from evenpipe.runtime.precisions import autocast_dtype
from evenpipe.schedule import FORWARD, Kind, Unit

if TYPE_CHECKING:
    from evenpipe.runtime.linear import LinearGradients

__all__ = ["Edges", "FusingStage", "ModuleStage", "SplitStage", "Stage", "Stepping", "VaryingStage", "check_sent"]


class Stage(Protocol):
    """The compute of one stage. A unit is one micro-batch in one model chunk of this stage."""

    def receive_buffers(self, kind: Kind, unit: Unit) -> list[Tensor]:
        """Fresh contiguous tensors for what `kind` (FORWARD: input, BACKWARD: gradient of the output) will receive."""

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """Compute `unit` from `inputs` (None at the start of the model) and return what the next stage needs."""

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """Back-propagate `gradients` of the outputs (None at the end of the model); return those of the inputs."""


class SplitStage(Stage, Protocol):
    """A stage whose backward can be done in two halves."""

    def backward_input(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """Return what `backward` does; the gradients of the weights are left for `backward_weight`."""

    def backward_weight(self, unit: Unit) -> None:
        """Accumulate the gradients of the weights, and let go of what is saved of the unit."""


class FusingStage(Stage, Protocol):
    """A stage that can compute a forward and a backward of another unit together."""

    def forward_and_backward(
        self, unit: Unit, inputs: list[Tensor] | None, other: Unit, gradients: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return what `forward` of `unit` and `backward` of `other` return."""


class VaryingStage(Stage, Protocol):
    """A stage that gives and takes other tensors from one micro-batch to the next."""

    def description(self, unit: Unit, outputs: list[Tensor]) -> list[int]:
        """Describe the `outputs` of `unit` in whole numbers, for the next stage's `buffers_like`."""

    def buffers_like(self, unit: Unit, description: Sequence[int]) -> list[Tensor]:
        """Return buffers for the input of `unit` that the stage before has described so."""


class Stepping(Protocol):
    """The optimizer of a stage in a stream without flushes: weights change between two of the stage's actions."""

    def use(self, unit: Unit) -> None:
        """Point the stage's parameters at the weights of `unit`, which is computed next."""

    def gather(self) -> None:
        """Start to exchange with all stages what the last batch's step depends on; all have computed that batch."""

    def update(self) -> None:
        """Finish that step."""


class Edges(NamedTuple):
    """For each chunk of a stage, tensors like those that it takes and gives for a micro-batch.

    The model's start takes none, and its end gives the loss. What comes back for those that require a gradient is one.
    """

    taken: Sequence[Sequence[Tensor]]
    given: Sequence[Sequence[Tensor]]

    @classmethod
    def alike(cls, boundary: Tensor, chunks: int = 1) -> Edges:
        """One tensor like `boundary` passes from chunk to chunk."""
        like = [boundary.detach().requires_grad_()]
        return cls([like] * chunks, [like] * chunks)


class ModuleStage:
    """A stage of plain modules, one per model chunk, that pass tensors like those of `edges` from chunk to chunk.

    A module takes them one by one, and returns one or a tuple of them. `first(i)` gives micro-batch i's input at the
    start of the model, `loss(i, output)` its scalar loss at the end, which follows chunk `loss_chunk` of this stage, or
    is on another one (None).
    Gradients accumulate in `parameter.grad`; `losses[i]` holds the detached losses. With `recording`, backwards are in
    two halves: `recording(unit)` is entered to save what the second needs. Without, a first half is the whole backward.
    `recomputed` chunks save their input alone, and are computed again by their backward: their modules change no state.
    `keywords(unit)`: what the unit's module takes by name.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        edges: Edges,
        first: Callable[[int], Tensor],
        loss: Callable[[int, Any], Tensor],
        loss_chunk: int | None,
        recording: Callable[[Unit], AbstractContextManager[object]] | None = None,
        recomputed: Collection[int] = (),
        keywords: Callable[[Unit], Mapping[str, Any]] = lambda unit: {},
    ) -> None:
        self.chunks = list(chunks)
        self._recomputed = recomputed
        self._keywords = keywords
        self.losses: dict[int, Tensor] = {}
        self._edges = edges
        self._first = first
        self._loss = loss
        self._loss_chunk = loss_chunk
        self._inputs: dict[Unit, list[Tensor]] = {}  # those that have gradients
        #: By their number among those that gradients come back for; what has been sent on, autograd alone holds.
        self._outputs: dict[Unit, dict[int, GradientEdge]] = {}
        self._weight_gradients: list[LinearGradients] = []
        if recording is not None:
            from evenpipe.runtime.linear import LinearGradients  # which loads what compiles

            self._weight_gradients = [LinearGradients(chunk, recording, self.chunks) for chunk in self.chunks]

    def receive_buffers(self, kind: Kind, unit: Unit) -> list[Tensor]:
        """Return tensors like those of the edge; for gradients like those that have any."""
        if kind == FORWARD:
            like = self._edges.taken[unit.chunk]
            return [_empty(one).requires_grad_(one.requires_grad) for one in like]
        return [_empty(one) for one in self._edges.given[unit.chunk] if one.requires_grad]

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """Return the chunk's outputs, or its loss where the model ends."""
        with self._weight_gradients[unit.chunk].calls if self._weight_gradients else nullcontext():
            returned = self.compute(unit, inputs)
            if unit.chunk == self._loss_chunk:
                returned = self._loss(unit.micro_batch, returned)
                self.losses[unit.micro_batch] = returned.detach()
        outputs = list(returned) if isinstance(returned, tuple) else [returned]
        edge = self._edges.given[unit.chunk]
        if unit.chunk != self._loss_chunk:
            check_sent(outputs, [(tuple(like.shape), like.dtype) for like in edge], unit)
        if inputs is not None and torch.is_grad_enabled():
            self._inputs[unit] = _learning(inputs, self._edges.taken[unit.chunk])
        # Of what frozen parameters alone have made, a gradient that comes back is needed by nobody.
        given = [(number, one) for number, one in enumerate(_learning(outputs, edge)) if one.requires_grad]
        self._outputs[unit] = {number: get_gradient_edge(one) for number, one in given}
        return outputs

    def compute(self, unit: Unit, inputs: list[Tensor] | None) -> Any:
        """Return what the unit's module returns."""
        arguments = [self._first(unit.micro_batch)] if inputs is None else inputs
        named = self._keywords(unit)
        if unit.chunk in self._recomputed:
            return checkpoint(self.chunks[unit.chunk], *arguments, use_reentrant=False, **named)
        return self.chunks[unit.chunk](*arguments, **named)

    def forget(self) -> None:
        """Let go of what has been forwarded and not backwarded."""
        self._inputs.clear()
        self._outputs.clear()
        for of_chunk in self._weight_gradients:
            of_chunk.end()

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """Return the gradients of the received inputs; nothing at the start of the model."""
        found = self.backward_input(unit, gradients)
        self.backward_weight(unit)
        return found

    def backward_input(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """Return the gradients of the received inputs; linear layers leave those of their weights."""
        if not self._weight_gradients:
            return self._backward(unit, gradients)
        return self._weight_gradients[unit.chunk].leave(unit, lambda: self._backward(unit, gradients))

    def backward_weight(self, unit: Unit) -> None:
        """Accumulate into `parameter.grad`, as a whole backward does."""
        if self._weight_gradients:
            self._weight_gradients[unit.chunk].compute(unit)

    def _backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        outputs = self._outputs.pop(unit)
        if outputs:
            torch.autograd.backward(list(outputs.values()), _of(outputs, gradients))
        return [_gradient(taken, unit) for taken in self._inputs.pop(unit, ())]


def check_sent(outputs: Sequence[Any], edge: Sequence[tuple[tuple[int, ...], torch.dtype]], unit: Unit) -> None:
    """Raise ValueError where `outputs` of `unit` have not the shapes and dtypes that the next part receives by."""
    for number, (shape, dtype) in enumerate(edge[: len(outputs)]):
        output = outputs[number]
        if not isinstance(output, Tensor) or output.layout != torch.strided:
            kind = str(output.layout) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"{_output(unit, number)} is {kind}: parts hand on dense tensors")
        if (tuple(output.shape), output.dtype) != (shape, dtype):
            raise ValueError(
                f"{_output(unit, number)} is {tuple(output.shape)}, {output.dtype}, and the next part receives "
                f"{shape}, {dtype}: {_remedy(output, dtype)}"
            )
    if len(outputs) != len(edge):
        raise ValueError(
            f"chunk {unit.chunk}: its output is {len(outputs)} tensors, and the next part receives {len(edge)}"
        )


def _output(unit: Unit, number: int) -> str:
    return f"chunk {unit.chunk}: output {number} of micro-batch {unit.micro_batch}"


def _remedy(sent: Tensor, dtype: torch.dtype) -> str:
    if sent.dtype == dtype:
        return "give micro-batches of one size, the one that the pipeline was made for"
    if autocast_dtype(sent.device.type) is not None:
        return "torch.autocast is on: make the pipeline, or its plan, for what it gives, or turn it off"
    return "cast what is handed on, or make the pipeline for this dtype"


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _learning(tensors: Sequence[Tensor], edge: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors of an edge that a gradient comes back for."""
    return [one for one, like in zip(tensors, edge, strict=True) if like.requires_grad]


def _of(outputs: dict[int, GradientEdge], gradients: Sequence[Tensor] | None) -> list[Tensor] | None:
    """Return the gradients of these outputs among those that have come back."""
    return None if gradients is None else [gradients[number] for number in outputs]


def _gradient(received: Tensor, unit: Unit) -> Tensor:
    if received.grad is None:
        raise RuntimeError(
            f"chunk {unit.chunk}: its output does not depend on its input, so that the stage before would wait for a "
            "gradient for ever: have each part of the model use what it takes"
        )
    return received.grad
