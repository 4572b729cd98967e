"""What one stage computes and saves for micro-batches of a size, found by doing it (Ada-Grouper §5.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker
from torch import Tensor

from evenpipe.megatron.grad_sync import without_sync
from evenpipe.megatron.half_layers import random_numbers_kept
from evenpipe.megatron.schedule import Call
from evenpipe.megatron.stage import MegatronStage
from evenpipe.megatron.supported import CoreRelease
from evenpipe.planner.grouped import average_ms
from evenpipe.planner.memory import Measured
from evenpipe.runtime.executor import Executor
from evenpipe.runtime.store import ActivationStore
from evenpipe.schedule import BACKWARD, FORWARD, Size, Unit, build

__all__ = ["Rehearsal", "workspace_bytes"]

#: Micro-batches that are timed, after those that load kernels and fill caches, which are weighed.
_WEIGHED: Final = 2
_TIMED: Final = 4
#: More of them are weighed where experts get other numbers of tokens in each.
_WEIGHED_OF_EXPERTS: Final = 6


class Rehearsal:
    """One stage forwards and backwards micro-batches alone: no neighbour is waited for or sent to.

    What it computes with is made up where a neighbour would give it, so all it leaves behind is of no use: use it
    inside `without_a_trace`. `fits` says whether so many bytes of activations may be held; all ranks ask it alike.
    """

    def __init__(
        self, executor: Executor, parameters: Sequence[Tensor], release: CoreRelease, fits: Callable[[int], bool]
    ) -> None:
        self._device = executor.device
        self._clock = executor.clock
        self._parameters = parameters
        self._release = release
        self._fits = fits
        self._shared_bytes: int | None = None

    def measured(self, call: Call) -> Measured:
        """What micro-batches of `call` take and hold here, but for what stays from batch to batch, which is 0.

        Of the first call's, two are held at a time, if they fit, which shows what micro-batches share (such as a causal
        mask); else they are taken to share nothing. Of others one is. With experts several are, one by one, and the
        largest counts: what two of them save says nothing of what they share.
        """
        differ = bool(call.batch.config.num_moe_experts)
        weighed = _WEIGHED_OF_EXPERTS if differ else _WEIGHED
        # One micro-batch more than are used: with the last one, replicas would begin to reduce gradients.
        schedule = build("gpipe", Size(call.pipeline.size(), weighed + _TIMED + 1)).schedule
        stage = MegatronStage(call.batch, schedule, call.pipeline.rank(), self._device, self._release)
        if differ:
            each, shared = max(self._alone(stage, call, Unit(number)) for number in range(weighed)), 0
        else:
            each, shared = self._weighed(stage, call)
        message = sum(math.prod(shape) for shape in call.batch.send_shapes) * call.batch.config.pipeline_dtype.itemsize
        workspace = workspace_bytes()
        marks = [self._timed(stage, call, Unit(weighed + number)) for number in range(_TIMED)]
        forward_ms = average_ms(self._clock.elapsed_ms(start, between) for start, between, _ in marks)
        backward_ms = average_ms(self._clock.elapsed_ms(between, end) for _, between, end in marks)
        return Measured(forward_ms, backward_ms, each, shared, message, workspace, 0)

    def _weighed(self, stage: MegatronStage, call: Call) -> tuple[int, int]:
        """Bytes that a micro-batch saves, and that are shared."""
        store = ActivationStore(self._parameters, device=self._device)
        units = [Unit(0)]
        first = self._recorded(stage, call, store, units[0])
        if self._shared_bytes is None:
            self._shared_bytes = 0
            if self._fits(2 * first):
                units.append(Unit(1))
                self._shared_bytes = first - self._recorded(stage, call, store, units[1])
        for unit in units:
            stage.backward(unit, self._gradients(stage, call, unit))
        return first - self._shared_bytes, self._shared_bytes

    def _alone(self, stage: MegatronStage, call: Call, unit: Unit) -> int:
        """Bytes that it saves, what others would share with it too."""
        saved = self._recorded(stage, call, ActivationStore(self._parameters, device=self._device), unit)
        stage.backward(unit, self._gradients(stage, call, unit))
        return saved

    def _recorded(self, stage: MegatronStage, call: Call, store: ActivationStore, unit: Unit) -> int:
        inputs = self._inputs(stage, call, unit)
        with store.recording(unit):
            stage.forward(unit, inputs)
        return store.nbytes(unit)

    def _timed(self, stage: MegatronStage, call: Call, unit: Unit) -> tuple[Any, Any, Any]:
        """Marks of the clock before, between and after the two passes."""
        inputs, gradients = self._inputs(stage, call, unit), self._gradients(stage, call, unit)
        start = self._clock.mark()
        stage.forward(unit, inputs)
        between = self._clock.mark()
        stage.backward(unit, gradients)
        return start, between, self._clock.mark()

    @contextmanager
    def without_a_trace(self, call: Call) -> Iterator[None]:
        """Afterwards gradients are zero, and random numbers go on as if nothing had been drawn; nothing is logged."""
        parallel_state.get_global_memory_buffer().buffer.clear()  # it grows, but never shrinks
        with random_numbers_kept(self._device), without_sync(call.batch.config):
            yield
        chunks: Sequence[Any] = call.batch.model
        for chunk in chunks:
            chunk.zero_grad_buffer()
        clear_aux_losses_tracker()

    def _inputs(self, stage: MegatronStage, call: Call, unit: Unit) -> list[Tensor] | None:
        return _made_up(stage.receive_buffers(FORWARD, unit)) if call.pipeline.rank() > 0 else None

    def _gradients(self, stage: MegatronStage, call: Call, unit: Unit) -> list[Tensor] | None:
        is_last = call.pipeline.rank() == call.pipeline.size() - 1
        return None if is_last else _made_up(stage.receive_buffers(BACKWARD, unit))


def workspace_bytes() -> int:
    """Bytes that Megatron keeps for its largest attention scores so far."""
    return sum(tensor.nbytes for tensor in parallel_state.get_global_memory_buffer().buffer.values())


def _made_up(buffers: list[Tensor]) -> list[Tensor]:
    """Numbers of a usual size: those that memory happens to hold may be slow, or none."""
    with torch.no_grad():
        for buffer in buffers:
            buffer.normal_()
    return buffers
