"""Pipeline stages whose compute is a sleep, and wires whose bytes take their time: the rest of the runtime is real."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import torch
from torch import Tensor

from evenpipe.runtime.channel import Channel, Transfer
from evenpipe.runtime.connections import Connections
from evenpipe.runtime.stage import Edges, ModuleStage

__all__ = ["Accelerator", "clock_ms", "emulated_stage", "over_wires", "sleep_until"]

# A wait that took less found its message there already: posting, waking and Python take about so long.
_NOTICEABLE_MS: Final = 0.3


class Accelerator:
    """A device that works its queue while the host does other things: what its host spends between two actions costs
    nothing, unless it makes a message late.

    An action ends at max(end of the action before it, time at which its messages were there) + its duration.
    """

    def __init__(self, forward_ms: float, backward_ms: float) -> None:
        self.forward_ms = forward_ms
        self.backward_ms = backward_ms
        self._free_ms = 0.0

    def start(self, at_ms: float) -> None:
        """A batch begins at this time of the clock."""
        self.not_before(at_ms)
        sleep_until(at_ms)

    def not_before(self, at_ms: float) -> None:
        """What comes next has to wait for something that was there at `at_ms`."""
        self._free_ms = max(self._free_ms, at_ms)

    @property
    def free_ms(self) -> float:
        """When the device is done with all that it was given."""
        return self._free_ms

    def give(self, duration_ms: float) -> None:
        """Have the device compute so long next, and return at once."""
        self._free_ms += duration_ms

    def settle(self) -> None:
        """Return when the device is done with all that it was given."""
        sleep_until(self._free_ms)

    def compute(self, duration_ms: float) -> None:
        """Return when the device has spent `duration_ms`."""
        self.give(duration_ms)
        self.settle()


def clock_ms() -> float:
    """The clock that all processes of a machine share."""
    return time.monotonic() * 1e3


def sleep_until(at_ms: float) -> None:
    """Return at `at_ms` of the clock, at once if that is past."""
    if (left_ms := at_ms - clock_ms()) > 0:
        time.sleep(left_ms / 1e3)


class _Compute(torch.autograd.Function):
    """Sleeps both ways, and saves memory of its own that carries the micro-batch's number until the backward."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, accelerator: Accelerator, saved_bytes: int) -> Tensor:
        ctx.number, ctx.accelerator = number[0].item(), accelerator
        ctx.save_for_backward(torch.full((saved_bytes // 4,), ctx.number))
        accelerator.compute(accelerator.forward_ms)
        return number.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (saved,) = ctx.saved_tensors
        if not saved[0] == saved[-1] == ctx.number:
            raise RuntimeError(f"micro-batch {ctx.number:.0f} got another's activations back")
        ctx.accelerator.compute(ctx.accelerator.backward_ms)
        return gradient, None, None


class _Module(torch.nn.Module):
    def __init__(self, accelerator: Accelerator, saved_bytes: int) -> None:
        super().__init__()
        self.accelerator = accelerator
        self.saved_bytes = saved_bytes

    def forward(self, number: Tensor) -> Tensor:
        return _Compute.apply(number, self.accelerator, self.saved_bytes)


def emulated_stage(
    accelerator: Accelerator, saved_bytes: int, is_last: bool, boundary_bytes: int = 4096
) -> ModuleStage:
    """One stage's compute on `accelerator`, each micro-batch saving `saved_bytes`; neighbours exchange
    `boundary_bytes`."""
    elements = boundary_bytes // 4
    return ModuleStage(
        [_Module(accelerator, saved_bytes)],
        Edges.alike(torch.empty(elements)),
        first=lambda micro_batch: torch.full((elements,), float(micro_batch), requires_grad=True),
        loss=lambda _, output: output.sum(),
        loss_chunk=0 if is_last else None,
    )


def over_wires(connections: Connections, accelerator: Accelerator, transfer_ms: float) -> Connections:
    """The same connections, with the accelerator waiting for what its host waits for.

    A message on an evict or load link takes `transfer_ms` from when its bytes are through (if they are few: from when
    both ends are ready) and the wire is free.
    """
    wires: dict[Any, Any] = {
        link: _Wire(channel, accelerator, transfer_ms if link.kind in ("evict", "load") else 0.0)
        for link, channel in connections.channels.items()
    }
    return Connections(wires, connections.layouts)


class _Wire:
    """A channel whose messages take at least so long, one after the other."""

    def __init__(self, channel: Channel, accelerator: Accelerator, transfer_ms: float) -> None:
        self._channel = channel
        self._accelerator = accelerator
        self._transfer_ms = transfer_ms
        self._free_ms = 0.0
        # Nobody but a waiting thread learns when gloo has brought a message through.
        self._thread = ThreadPoolExecutor(1) if transfer_ms else None

    def send(self, tensors: list[Tensor]) -> _Flight:
        return self._flight(self._channel.send(tensors))

    def receive(self, buffers: list[Tensor], after: Sequence[_Flight] = ()) -> _Flight:
        return self._flight(self._channel.receive(buffers, [flight.arrived for flight in after]))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._channel.close()

    def _flight(self, transfer: Transfer) -> _Flight:
        arrival = None if self._thread is None else self._thread.submit(self._carry, transfer)
        return _Flight(transfer, arrival, self._accelerator)

    def _carry(self, transfer: Transfer) -> float:
        transfer.wait()
        self._free_ms = max(clock_ms(), self._free_ms) + self._transfer_ms
        return self._free_ms


class _Arrived:
    """What a transfer that follows a message waits for, and no accelerator."""

    def __init__(self, arrival: Future[float]) -> None:
        self._arrival = arrival

    def finish(self) -> None:
        sleep_until(self._arrival.result())


class _Flight:
    """A message on a wire; the accelerator waits for it too."""

    def __init__(self, transfer: Transfer, arrival: Future[float] | None, accelerator: Accelerator) -> None:
        self._transfer = transfer
        self._arrival = arrival
        self._accelerator = accelerator
        self.arrived: Any = transfer if arrival is None else _Arrived(arrival)

    def wait(self) -> None:
        if self._arrival is not None:
            arrival_ms = self._arrival.result()
            sleep_until(arrival_ms)
            self._accelerator.not_before(arrival_ms)
            return
        began_ms = clock_ms()
        self._transfer.wait()
        if (ended_ms := clock_ms()) - began_ms > _NOTICEABLE_MS:
            self._accelerator.not_before(ended_ms)
