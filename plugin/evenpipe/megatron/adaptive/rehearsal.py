"""What one stage computes and saves for micro-batches of one size, found by doing it (Ada-Grouper §5.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from evenpipe.megatron.schedule import Call
from evenpipe.megatron.stage import MegatronStage
from evenpipe.megatron.supported import CoreRelease
from evenpipe.runtime.executor import Executor
from evenpipe.runtime.store import ActivationStore
from evenpipe.schedule import BACKWARD, FORWARD, Unit, build

__all__ = ["REPEATS", "Rehearsal", "SavedBytes", "message_bytes", "workspace_bytes"]

#: Micro-batches that are timed, after one that loads kernels and fills caches.
_TIMED: Final = 3
#: Micro-batches for which a rehearsal needs data.
REPEATS: Final = 1 + _TIMED


class SavedBytes(NamedTuple):
    """What autograd saves on a stage: for each micro-batch, and once for all of them (such as a causal mask)."""

    by_each: int
    shared: int


class Rehearsal:
    """One stage forwards and backwards micro-batches alone: no neighbour is waited for or sent to.

    What it computes with is made up where a neighbour would give it, so all it leaves behind is of no use: use it
    inside `without_a_trace`. Calls need data for `REPEATS` micro-batches.
    """

    def __init__(self, executor: Executor, parameters: Sequence[Tensor], release: CoreRelease) -> None:
        self.device = executor.device
        self._clock = executor.clock
        self._parameters = parameters
        self._release = release

    def saved_bytes(self, call: Call, fits: Callable[[int], bool]) -> SavedBytes:
        """Of micro-batches of `call`. Two are held at a time, if `fits` says so of their bytes; else one is all shares.

        `fits` is asked by all ranks, with the first micro-batch held.
        """
        store = ActivationStore(self._parameters, device=self.device)
        stage = self._stage(call)
        units = [Unit(0)]
        self._forward(stage, call, store, units[0])
        first = store.nbytes(units[0])
        each = first
        if fits(2 * first):
            units.append(Unit(1))
            self._forward(stage, call, store, units[1])
            each = store.nbytes(units[1])
        for unit in units:
            stage.backward(unit, self._gradients(stage, call, unit))
        return SavedBytes(each, first - each)

    def saved_by_one(self, call: Call) -> int:
        """Bytes that one micro-batch of `call` saves, with what it shares with others."""
        store, stage, unit = ActivationStore(self._parameters, device=self.device), self._stage(call), Unit(0)
        self._forward(stage, call, store, unit)
        nbytes = store.nbytes(unit)
        stage.backward(unit, self._gradients(stage, call, unit))
        return nbytes

    def times_ms(self, call: Call) -> tuple[float, float]:
        """Of a forward and of a backward of a micro-batch of `call`, the shortest of some; one is held at a time.

        Nobody else uses the device (§4.3): what takes longer has been held up by the host.
        """
        clock, stage = self._clock, self._stage(call)
        marks = []
        for number in range(REPEATS):
            unit = Unit(number)
            inputs, gradients = self._inputs(stage, call, unit), self._gradients(stage, call, unit)
            start = clock.mark()
            stage.forward(unit, inputs)
            between = clock.mark()
            stage.backward(unit, gradients)
            marks.append((start, between, clock.mark()))
        forward_ms = min(clock.elapsed_ms(start, between) for start, between, _ in marks[1:])
        backward_ms = min(clock.elapsed_ms(between, end) for _, between, end in marks[1:])
        return forward_ms, backward_ms

    @contextmanager
    def without_a_trace(self, call: Call) -> Iterator[None]:
        """Afterwards gradients are zero, and random numbers go on as if nothing had been drawn."""
        parallel_state.get_global_memory_buffer().buffer.clear()  # it grows, but never shrinks
        device = self.device
        host, tracked = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        no_sync = call.batch.config.no_sync_func
        with ExitStack() as stack:
            for disabled in no_sync if isinstance(no_sync, list) else [no_sync] if no_sync is not None else []:
                stack.enter_context(disabled())
            yield
        chunks: Sequence[Any] = call.batch.model
        for chunk in chunks:
            chunk.zero_grad_buffer()
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
        get_cuda_rng_tracker().set_states(tracked)
        torch.set_rng_state(host)

    def _forward(self, stage: MegatronStage, call: Call, store: ActivationStore, unit: Unit) -> None:
        inputs = self._inputs(stage, call, unit)
        with store.recording(unit):
            stage.forward(unit, inputs)

    def _stage(self, call: Call) -> MegatronStage:
        # One micro-batch more than are used: with the last one, replicas would begin to reduce gradients.
        schedule = build("gpipe", call.pipeline.size(), REPEATS + 1)
        return MegatronStage(call.batch, schedule, call.pipeline.rank(), self.device, self._release)

    def _inputs(self, stage: MegatronStage, call: Call, unit: Unit) -> list[Tensor] | None:
        return _made_up(stage.receive_buffers(FORWARD, unit)) if call.pipeline.rank() > 0 else None

    def _gradients(self, stage: MegatronStage, call: Call, unit: Unit) -> list[Tensor] | None:
        is_last = call.pipeline.rank() == call.pipeline.size() - 1
        return None if is_last else _made_up(stage.receive_buffers(BACKWARD, unit))


def message_bytes(call: Call) -> int:
    """Bytes of what a stage sends to a neighbour for one micro-batch of `call`."""
    config = call.batch.config
    return sum(math.prod(shape) * config.pipeline_dtype.itemsize for shape in call.batch.send_shapes)


def workspace_bytes() -> int:
    """Bytes that Megatron keeps for its largest attention scores so far."""
    return sum(tensor.nbytes for tensor in parallel_state.get_global_memory_buffer().buffer.values())


def _made_up(buffers: list[Tensor]) -> list[Tensor]:
    """Numbers of a usual size: those that memory happens to hold may be slow, or none."""
    with torch.no_grad():
        for buffer in buffers:
            buffer.normal_()
    return buffers
