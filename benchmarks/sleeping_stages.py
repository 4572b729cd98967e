"""Stages of a real model on an emulated accelerator: they compute, and sleep for the rest of the time it would take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from emulation import Accelerator, clock_ms
from torch import Tensor

from evenpipe.runtime.channel import Layouts
from evenpipe.runtime.weight_gradients import WeightGradients
from evenpipe.schedule import Unit

__all__ = ["follow_waits", "slow_down", "slow_second_halves"]

# A wait that took less found what it waited for there already.
_NOTICEABLE_MS: Final = 0.3
_CHUNKS: Final = "chunks_of_a_stage"  # an attribute of slowed modules


def slow_down(module: torch.nn.Module, accelerator: Accelerator, halves: bool = False, chunks: int = 1) -> None:
    """From now on each forward and backward of `module` takes its time on `accelerator`, what it really computes
    included; in `halves`, a backward's first one takes half of it. Of `chunks` a stage each takes its share. `module`
    returns one tensor, and all of a backward goes through that.
    """
    forward_ms = accelerator.forward_ms / chunks
    backward_ms = accelerator.backward_ms / chunks / (2 if halves else 1)
    vars(module)[_CHUNKS] = chunks

    def stretched(_: torch.nn.Module, __: Any, output: Tensor) -> Tensor:
        stretched_output: Tensor = _Stretch.apply(output, accelerator, forward_ms, backward_ms)
        return stretched_output

    module.register_forward_hook(stretched)


def slow_second_halves(accelerator: Accelerator) -> None:
    """From now on the second half of every backward takes half a backward's time, what it really computes included.

    Of slowed modules, wrapped for data parallelism.
    """
    make, original, shares = WeightGradients.__init__, WeightGradients.compute, WeakKeyDictionary[Any, int]()

    def made(self: WeightGradients, chunk: torch.nn.Module, *others: Any) -> None:
        make(self, chunk, *others)
        shares[self] = vars(chunk.module)[_CHUNKS]

    def compute(self: WeightGradients, unit: Unit) -> None:
        original(self, unit)
        accelerator.compute(accelerator.backward_ms / 2 / shares[self])

    WeightGradients.__init__ = made  # type: ignore[method-assign, assignment]
    WeightGradients.compute = compute  # type: ignore[method-assign]


def follow_waits(accelerator: Accelerator) -> None:
    """From now on whatever this process waits for is an input that `accelerator` waits for too: messages, collectives.

    Without a wait, what the host does between two actions costs nothing, unless it makes a message late. So it is with
    what hosts tell each other of evicted micro-batches, which their devices know nothing of.
    """
    original = dist.Work.wait
    among_hosts = False

    def wait(self: dist.Work, *args: Any, **kwargs: Any) -> Any:
        began_ms = clock_ms()
        result = original(self, *args, **kwargs)
        if (ended_ms := clock_ms()) - began_ms > _NOTICEABLE_MS and not among_hosts:
            accelerator.not_before(ended_ms)
        return result

    def for_hosts(method: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any) -> Any:
            nonlocal among_hosts
            among_hosts = True
            try:
                return method(*args)
            finally:
                among_hosts = False

        return told

    dist.Work.wait = wait  # type: ignore[method-assign]
    Layouts.send = for_hosts(Layouts.send)  # type: ignore[method-assign]
    Layouts.receive = for_hosts(Layouts.receive)  # type: ignore[method-assign]


class _Stretch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, accelerator: Accelerator, forward_ms: float, backward_ms: float) -> Tensor:
        ctx.accelerator, ctx.backward_ms = accelerator, backward_ms
        accelerator.compute(forward_ms)
        # A tensor of its own: Megatron frees what it has sent.
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        accelerator, backward_ms = ctx.accelerator, ctx.backward_ms
        # First of the backward; the callback comes when autograd is done with all of it.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: accelerator.compute(backward_ms))
        return gradient, None, None, None
