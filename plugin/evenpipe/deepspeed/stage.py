"""DeepSpeed's forward and backward passes as the stage that EvenPipe's executor drives, and what crosses its ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor

from evenpipe.deepspeed.planned.stage import CutStage, jointly
from evenpipe.runtime.linear import LinearGradients
from evenpipe.schedule import FORWARD, Kind, Unit
from evenpipe.stage_code import users_lines

__all__ = ["Boundary", "EngineStage", "tensors_of"]

#: All that torch has, in an order that is the same in every process.
_TYPES: Final = tuple(sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str))


class Boundary:
    """The input and the output of one stage's `engine`.

    What they are like is announced by the sender in DeepSpeed's protocol at the first forward, as micro-batches are all
    alike; with DeepSpeed's `dynamic_shape` every message is described. `nbytes` are those of an input or an output, the
    largest so far.
    """

    def __init__(self, engine: Any) -> None:
        self.nbytes = 0
        self._engine = engine
        self._outputs: list[tuple[torch.Size, torch.dtype]] | None = None
        self._input: Any = None

    def announce(self, outputs: Any) -> None:
        """At the sender, after each forward, where all are alike. Raises RuntimeError if it has changed."""
        found = [(tensor.size(), tensor.dtype) for tensor in tensors_of(outputs)]
        if self._outputs is None:
            self._engine._send_tensor_meta(outputs, self._engine.next_stage)
            self._outputs = found
            self._weigh(tensors_of(outputs))
        elif self._outputs != found:
            raise RuntimeError(
                f"stage {self._engine.stage_id} hands {found} on where an earlier micro-batch had {self._outputs}: pad "
                "micro-batches to one size, or give PipelineModule dynamic_shape=True"
            )

    def input_buffers(self) -> list[Tensor]:
        """At the receiver: fresh tensors for one input; waits for the sender where it has not announced one yet.

        No deadlock: a stage's first step posts the receive of its first input, and waits for nothing before it.
        """
        if self._input is None:
            self._input = self._engine._recv_tensor_meta(self._engine.prev_stage)
        return self._buffers((like.size(), like.dtype) for like in tensors_of(self._input))

    @property
    def takes_a_tuple(self) -> bool:
        """Return whether an announced input is a tuple, and not one tensor."""
        return isinstance(self._input, tuple)

    def description(self, outputs: Any) -> list[int]:
        """At the sender: whether these are a tuple, and each one's type and shape."""
        tensors = tensors_of(outputs)
        self._weigh(tensors)
        each = (number for one in tensors for number in (_TYPES.index(one.dtype), one.dim(), *one.shape))
        return [int(isinstance(outputs, tuple)), *each]

    def described_buffers(self, description: Sequence[int]) -> tuple[bool, list[Tensor]]:
        """At the receiver: whether it is a tuple, and fresh tensors for it."""
        numbers = iter(description)
        is_tuple = bool(next(numbers))
        each = ((torch.Size(islice(numbers, next(numbers))), _TYPES[kind]) for kind in numbers)
        return is_tuple, self._buffers(each)

    def _buffers(self, those: Iterable[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
        device = self._engine.device
        found = [
            torch.empty(size, dtype=dtype, device=device, requires_grad=dtype.is_floating_point)
            for size, dtype in those
        ]
        self._weigh(found)
        return found

    def _weigh(self, tensors: Iterable[Tensor]) -> None:
        self.nbytes = max(self.nbytes, sum(tensor.nbytes for tensor in tensors))


class EngineStage:
    """One batch on one stage of `engine`; `buffer_of` knows the number of a micro-batch's pipeline buffer.

    Where the stage `moves` what is saved, or recomputes and swaps what a plan chose, autograd's saved tensors are all
    recorded, and what the engine keeps beside them is freed.
    """

    def __init__(
        self,
        engine: Any,
        boundary: Boundary,
        buffer_of: Callable[[Unit], int],
        moves: bool,
        recording: Callable[[Unit], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._engine = engine
        self._boundary = boundary
        self._buffer_of = buffer_of
        self._cut: CutStage | None = engine.cut
        self._frees = moves or (self._cut is not None and self._cut.keeper is not None)
        self._losses: dict[Unit, Any] = {}
        self._dynamic: bool = engine.module.dynamic_shape
        self._tuples: dict[Unit, bool] = {}
        self._weight_gradients = None if recording is None else LinearGradients(engine.module, recording)

    def receive_buffers(self, kind: Kind, unit: Unit) -> list[Tensor]:
        """Tensors like the input that the stage before announced, or like the unit's outputs, which exist by now."""
        if kind == FORWARD:
            return self._boundary.input_buffers()
        outputs = _differentiable(self._engine.pipe_buffers["outputs"][self._buffer_of(unit)])
        return [torch.empty_like(output, memory_format=torch.contiguous_format) for output in outputs]

    def description(self, unit: Unit, outputs: list[Tensor]) -> list[int]:
        """Return the description of these outputs, in the form that the stage has them in."""
        return self._boundary.description(self._engine.pipe_buffers["outputs"][self._buffer_of(unit)])

    def buffers_like(self, unit: Unit, description: Sequence[int]) -> list[Tensor]:
        """Tensors as the stage before has described them, and the form in which it had them."""
        self._tuples[unit], buffers = self._boundary.described_buffers(description)
        return buffers

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """DeepSpeed's forward pass. The last stage keeps the loss, since the engine has room for one only."""
        engine, buffer = self._engine, self._buffer_of(unit)
        if inputs is not None:
            is_tuple = self._tuples.pop(unit, self._boundary.takes_a_tuple)
            engine.pipe_buffers["inputs"][buffer] = tuple(inputs) if is_tuple else inputs[0]
        training = nullcontext() if self._cut is None else self._cut.training(unit, engine.number_of(unit))
        with training, nullcontext() if self._weight_gradients is None else self._weight_gradients.calls:
            engine._exec_forward_pass(buffer)
        if engine.is_last_stage():
            self._losses[unit] = engine.loss
            return []
        outputs = engine.pipe_buffers["outputs"][buffer]
        if not self._dynamic:
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
        found = self.backward_input(unit, gradients)
        self.backward_weight(unit)
        return found

    def backward_input(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """DeepSpeed's backward pass, in which linear layers leave the gradients of their weights."""
        if self._weight_gradients is None:
            return self._backward(unit, gradients)
        return self._weight_gradients.leave(unit, lambda: self._backward(unit, gradients))

    def backward_weight(self, unit: Unit) -> None:
        """Accumulate what the first half has left, as DeepSpeed's backward pass does."""
        if self._weight_gradients is None:
            return
        engine, optimizer = self._engine, self._engine.optimizer
        adds = engine.using_bf16_optimizer and not optimizer.immediate_grad_update
        if adds:  # what the first half has made is in the sums in fp32 already
            optimizer.clear_lp_grads(set_to_none=True)
        engine._running_engine_backward = True  # else ZeRO's hooks end a backward that was the user's own
        try:
            self._weight_gradients.compute(unit)
        finally:
            engine._running_engine_backward = False
        if adds:
            optimizer.update_hp_grads(clear_lp_grads=False)
            optimizer.clear_lp_grads(set_to_none=True)

    def _backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        engine, buffer = self._engine, self._buffer_of(unit)
        if gradients is None:
            engine.loss = self._losses.pop(unit)
        else:
            outputs = engine.pipe_buffers["outputs"]
            if self._cut is not None and gradients:
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
    """Return the tensors of a stage's input or output."""
    return value if isinstance(value, tuple) else (value,)


def _differentiable(value: Any) -> list[Tensor]:
    """Return the tensors of `value` that gradients come back for."""
    return [tensor for tensor in tensors_of(value) if tensor.is_floating_point()]
