"""The tensors that cross from one stage to the next, whose shapes and dtypes the sender announces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Boundary", "differentiable", "tensors_of"]


class Boundary:
    """The input and the output of one stage's `engine`, their shapes announced by DeepSpeed's own protocol.

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


def tensors_of(value: Any) -> tuple[Tensor, ...]:
    """The tensors of a stage's input or output."""
    return value if isinstance(value, tuple) else (value,)


def differentiable(value: Any) -> list[Tensor]:
    """Those of them that gradients come back for."""
    return [tensor for tensor in tensors_of(value) if tensor.is_floating_point()]
