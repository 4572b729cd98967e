"""DeepSpeed's forward and backward passes as the stage that EvenPipe's executor drives, and what crosses its ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from evenpipe.deepspeed.planned.stage import CutStage, jointly
from evenpipe.partition.code import users_lines
from evenpipe.schedule import FORWARD, Kind, Unit

__all__ = ["Boundary", "EngineStage", "tensors_of"]


class Boundary:
    """The input and the output of one stage's `engine`, their shapes announced by the sender in DeepSpeed's protocol.

    It does so at the first forward, as micro-batches are all alike; with DeepSpeed's `dynamic_shape`, at every one.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._always: bool = engine.module.dynamic_shape
        self._outputs: list[tuple[torch.Size, torch.dtype]] | None = None
        self._input: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of a micro-batch's input or output, whichever is larger, as announced."""
        inputs = [] if self._input is None else [(tensor.size(), tensor.dtype) for tensor in tensors_of(self._input)]
        return max(sum(size.numel() * dtype.itemsize for size, dtype in end) for end in (inputs, self._outputs or []))

    def announce(self, outputs: Any) -> None:
        """At the sender, after each forward. Raises RuntimeError if it has changed."""
        found = [(tensor.size(), tensor.dtype) for tensor in tensors_of(outputs)]
        if self._outputs is None or self._always:
            self._engine._send_tensor_meta(outputs, self._engine.next_stage)
            self._outputs = found
        elif self._outputs != found:
            raise RuntimeError(
                f"stage {self._engine.stage_id} hands {found} on where an earlier micro-batch had {self._outputs}: pad "
                "micro-batches to one size, or give PipelineModule dynamic_shape=True"
            )

    def input_buffers(self) -> list[Tensor]:
        """At the receiver: fresh tensors for one input; waits for the sender where it has not announced one yet.

        No deadlock: a stage's first step posts the receive of its first input, and waits for nothing before it. With
        dynamic shapes an input is posted by its own forward, which waits for nothing but stages before.
        """
        if self._input is None or self._always:
            self._input = self._engine._recv_tensor_meta(self._engine.prev_stage)
        return [
            torch.empty(like.size(), dtype=like.dtype, device=like.device, requires_grad=like.is_floating_point())
            for like in tensors_of(self._input)
        ]

    def as_input(self, tensors: Sequence[Tensor]) -> Any:
        """`tensors` in the form that the stage before had them in: one tensor, or a tuple."""
        return tuple(tensors) if isinstance(self._input, tuple) else tensors[0]


class EngineStage:
    """One batch on one stage of `engine`; `buffer_of` knows the number of a micro-batch's pipeline buffer.

    Where the stage `evicts`, or recomputes and swaps what a plan chose, autograd's saved tensors are all recorded, and
    what the engine keeps beside them is freed.
    """

    def __init__(self, engine: Any, boundary: Boundary, buffer_of: Callable[[Unit], int], evicts: bool) -> None:
        self._engine = engine
        self._boundary = boundary
        self._buffer_of = buffer_of
        self._cut: CutStage | None = engine.cut
        self._frees = evicts or (self._cut is not None and self._cut.keeper is not None)
        self._losses: dict[Unit, Any] = {}

    def receive_buffers(self, kind: Kind, unit: Unit) -> list[Tensor]:
        """Tensors like the input that the stage before announced, or like the unit's outputs, which exist by now."""
        if kind == FORWARD:
            return self._boundary.input_buffers()
        outputs = _differentiable(self._engine.pipe_buffers["outputs"][self._buffer_of(unit)])
        return [torch.empty_like(output, memory_format=torch.contiguous_format) for output in outputs]

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """DeepSpeed's forward pass. The last stage keeps the loss, since the engine has room for one only."""
        engine, buffer = self._engine, self._buffer_of(unit)
        if inputs is not None:
            engine.pipe_buffers["inputs"][buffer] = self._boundary.as_input(inputs)
        if self._cut is None:
            engine._exec_forward_pass(buffer)
        else:
            with self._cut.training(unit, engine.number_of(unit)):
                engine._exec_forward_pass(buffer)
        if engine.is_last_stage():
            self._losses[unit] = engine.loss
            return []
        outputs = engine.pipe_buffers["outputs"][buffer]
        self._boundary.announce(outputs)
        handed_over = [output.detach() for output in tensors_of(outputs)]
        if self._frees:
            # The engine computed with a clone of the input, of which only the gradient is still needed; of an output
            # only its place in the graph is. What has none may be anybody's, such as a mask that a layer keeps.
            computed = [output for output in tensors_of(outputs) if output.grad_fn is not None]
            for tensor in (*(inputs or ()), *computed):
                _free(tensor)
        return handed_over

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """DeepSpeed's backward pass; lets go of all that the engine holds of the micro-batch."""
        engine, buffer = self._engine, self._buffer_of(unit)
        if gradients is None:
            engine.loss = self._losses.pop(unit)
        else:
            outputs = engine.pipe_buffers["outputs"]
            if self._cut is not None:
                outputs[buffer] = jointly(_differentiable(outputs[buffer]), gradients)
                gradients = [torch.ones_like(outputs[buffer])]
            engine.grad_layer = gradients[0] if isinstance(outputs[buffer], Tensor) else gradients
        with nullcontext() if self._cut is None else users_lines(self._cut.part):
            engine._exec_backward_pass(buffer)
        results = [] if engine.is_first_stage() else _gradients(engine.pipe_buffers["inputs"][buffer])
        engine.grad_layer = None
        for of_kind in engine.pipe_buffers.values():
            of_kind[buffer] = None
        return results


def _free(tensor: Tensor) -> None:
    """Give up the memory of `tensor` and keep its shape, which backward passes look at."""
    tensor.data = tensor.new_empty(()).expand(tensor.shape)


def _gradients(inputs: Any) -> list[Tensor]:
    gradients = []
    for tensor in _differentiable(inputs):
        if tensor.grad is None:
            raise RuntimeError(
                "a floating-point input of a stage got no gradient, so the stage before would wait for it: use every "
                "one of them in the stage, or hand on integers"
            )
        gradients.append(tensor.grad)
    return gradients


def tensors_of(value: Any) -> tuple[Tensor, ...]:
    """The tensors of a stage's input or output."""
    return value if isinstance(value, tuple) else (value,)


def _differentiable(value: Any) -> list[Tensor]:
    """Those of them that gradients come back for."""
    return [tensor for tensor in tensors_of(value) if tensor.is_floating_point()]
