"""The part of a model that every engine runs: it sleeps as long as an accelerator computes, and saves so many bytes."""

from __future__ import annotations

from functools import partial
from typing import Any, Final, NamedTuple

import torch
from emulation import Accelerator
from torch import Tensor, nn

from evenpipe.runtime.weight_gradients import MARK

__all__ = ["BOUNDARY", "MIB", "Live", "Part", "Setting", "boundary"]

MIB: Final = 2**20
#: What passes from part to part for a micro-batch: sequence, samples, width; 1 MiB.
BOUNDARY: Final = (256, 1, 1024)


class Setting(NamedTuple):
    """A pipeline. Times and bytes are of a whole stage and a micro-batch; of v parts each has 1/v.

    A backward is the gradient of the input and that of the weights, one after the other where nothing splits them.
    Halves of stages, in the order of the model, take equal times; if `uneven`, the embedding makes the first 5 % longer
    and the head the last 30 %.
    """

    stages: int
    micro_batches: int
    forward_ms: float
    input_ms: float
    weight_ms: float
    saved_bytes: int
    uneven: bool = False

    @property
    def least_ms(self) -> float:
        """A batch without any bubble, were the model cut evenly."""
        stages = sum(self.share(position, 1) for position in range(self.stages)) / self.stages
        return self.micro_batches * (self.forward_ms + self.input_ms + self.weight_ms) * stages

    def share(self, position: int, chunks: int) -> float:
        """Return a part's share of a stage's time; a stage has `chunks` parts (one or two)."""
        halves = [1.0] * (2 * self.stages)
        if self.uneven:
            halves[0], halves[-1] = 1.05, 1.3
        return sum(halves[position * 2 // chunks : (position + 1) * 2 // chunks]) / 2


def boundary() -> Tensor:
    """What enters the model."""
    return torch.zeros(BOUNDARY)


class Live:
    """Bytes of what this process' parts have saved and nobody has let go of, and the most since `reset`."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def reset(self) -> None:
        """The peak is what is there now."""
        self.peak = self.now

    def add(self, nbytes: int) -> None:
        """So much more, or less."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)


class _Counted(bytearray):
    """Memory that is counted as long as anything refers to it."""

    live: Live

    def __del__(self) -> None:
        self.live.add(-len(self))


class _Input(torch.autograd.Function):
    """Forward, and the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, start: Tensor, part: Part) -> Tensor:
        ctx.part = part
        part.accelerator.compute(part.forward_ms)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        ctx.part.accelerator.compute(ctx.part.input_ms)
        return gradient, gradient.new_zeros(1) if ctx.needs_input_grad[1] else None, None


class _Weight(torch.autograd.Function):
    """Saves what the gradient of the weights needs, and computes that."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, part: Part) -> Tensor:
        ctx.part = part
        memory = _Counted(part.saved_bytes)
        memory.live = part.live
        part.live.add(part.saved_bytes)
        ctx.save_for_backward(torch.frombuffer(memory, dtype=torch.uint8).fill_(part.mark))
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        (saved,) = ctx.saved_tensors
        halves = getattr(ctx.part.weight, MARK, None)  # EvenPipe's, where a layer leaves what a second half computes
        if halves is None:
            return ctx.part.weight_gradient(saved, gradient), None
        halves.add(ctx.part.weight, [saved], partial(ctx.part.weight_gradient, gradient=gradient))
        return None, None


class _Join(torch.autograd.Function):
    """The output, of which both gradients come."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_zeros(1)


class Part(nn.Module):
    """One of `chunks` parts of a stage; `position` in the model counts from 0.

    The gradients of input and weights are apart in autograd's graph, so that a schedule may split the backward there.
    """

    def __init__(self, setting: Setting, position: int, chunks: int, accelerator: Accelerator, live: Live) -> None:
        super().__init__()
        share = setting.share(position, chunks)
        self.weight = nn.Parameter(torch.zeros(1))
        # Without a gradient of its own the model's first part would have no input's to compute: embeddings want it.
        self.start = nn.Parameter(torch.zeros(1), requires_grad=position == 0)
        self.mark = position % 251 + 1
        self.accelerator, self.live = accelerator, live
        self.forward_ms, self.input_ms, self.weight_ms = (
            ms * share for ms in (setting.forward_ms, setting.input_ms, setting.weight_ms)
        )
        self.saved_bytes = setting.saved_bytes // chunks

    def forward(self, given: Tensor) -> Tensor:
        output: Tensor = _Join.apply(_Input.apply(given, self.start, self), _Weight.apply(self.weight, self))
        return output

    def weight_gradient(self, saved: Tensor, gradient: Tensor) -> Tensor:
        """The second half of a backward."""
        if not saved[0] == saved[-1] == self.mark:
            raise RuntimeError("a part got another's activations back")
        self.accelerator.compute(self.weight_ms)
        return gradient
