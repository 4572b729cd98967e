"""What the executor needs of one pipeline stage, and the plain `nn.Module` that fulfils it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from evenpipe.schedule import BACKWARD, FORWARD, Kind, Unit

__all__ = ["ModuleStage", "Stage", "SteppingStage"]


class Stage(Protocol):
    """The compute of one stage. A unit is one micro-batch in one model chunk of this stage."""

    def receive_buffers(self, kind: Kind, unit: Unit) -> list[Tensor]:
        """Fresh contiguous tensors for what `kind` (FORWARD: input, BACKWARD: gradient of the output) will receive."""

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """Compute `unit` from `inputs` (None at the start of the model) and return what the next stage needs."""

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """Back-propagate `gradients` of the outputs (None at the end of the model); return those of the inputs."""


class SteppingStage(Stage, Protocol):
    """A stage of a stream without flushes: its weights change between two of its actions."""

    def update(self, batch: int) -> None:
        """Finish the step of `batch`, counted along the stream."""


class ModuleStage:
    """A stage of plain modules, one per model chunk, that pass one tensor of one shape from chunk to chunk.

    `first(i)` gives micro-batch i's input at the start of the model, `loss(i, output)` its scalar loss at the end;
    `update(t)` finishes the step of batch t where a schedule asks for it.
    Gradients accumulate in `parameter.grad`; `losses[i]` holds the detached losses of a last stage.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        boundary: Tensor,
        first: Callable[[int], Tensor],
        loss: Callable[[int, Tensor], Tensor],
        is_last: bool,
        update: Callable[[int], None] = lambda batch: None,
    ) -> None:
        self.chunks = list(chunks)
        self.losses: dict[int, Tensor] = {}
        self._boundary = boundary
        self._first = first
        self._loss = loss
        self._update = update
        self._last_chunk = len(self.chunks) - 1 if is_last else -1
        self._inputs: dict[Unit, Tensor] = {}
        self._outputs: dict[Unit, Tensor] = {}

    def receive_buffers(self, kind: Kind, unit: Unit) -> list[Tensor]:
        """One tensor shaped like `boundary`."""
        return [torch.empty_like(self._boundary, requires_grad=kind == FORWARD)]

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """The chunk's output, or its loss on the last chunk of the last stage."""
        taken = self._first(unit.micro_batch) if inputs is None else inputs[0]
        output = self.chunks[unit.chunk](taken)
        if unit.chunk == self._last_chunk:
            output = self._loss(unit.micro_batch, output)
            self.losses[unit.micro_batch] = output.detach()
        if inputs is not None:
            self._inputs[unit] = taken
        self._outputs[unit] = output
        return [output]

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """The gradient of the received input; nothing at the start of the model."""
        torch.autograd.backward(self._outputs.pop(unit), None if gradients is None else gradients[0])
        taken = self._inputs.pop(unit, None)
        if taken is None:
            return []
        assert taken.grad is not None, f"{BACKWARD}{unit.micro_batch}: the input does not reach the output"
        return [taken.grad]

    def update(self, batch: int) -> None:
        """Call the `update` that the stage was given."""
        self._update(batch)
