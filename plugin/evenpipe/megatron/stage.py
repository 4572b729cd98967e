"""Megatron's forward and backward steps as the stage that EvenPipe's executor drives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_type
from torch import Tensor

from evenpipe.megatron.grad_sync import GradSync, Sync
from evenpipe.megatron.supported import CoreRelease
from evenpipe.megatron.weight_gradients import WeightGradients
from evenpipe.runtime.channel import shapes_received, shapes_sent
from evenpipe.runtime.stage import check_sent
from evenpipe.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Kind, Schedule, Unit

__all__ = ["Batch", "MegatronStage"]


class Batch(NamedTuple):
    """The arguments of one call of a forward-backward function; the lists have one entry per model chunk."""

    forward_step_func: Callable[..., Any]
    data_iterators: Sequence[Iterator[Any] | None]
    model: Sequence[torch.nn.Module]
    config: Any
    num_microbatches: int
    receive_shapes: Sequence[tuple[int, ...]]
    send_shapes: Sequence[tuple[int, ...]]
    context_parallel_size: int
    collect_non_loss_data: bool


class MegatronStage:
    """One batch on one stage. `losses` is what the schedule function returns; `tokens` counts them on the device.

    `recording(unit)` is entered to save what the second half of a backward needs.
    """

    def __init__(
        self,
        batch: Batch,
        schedule: Schedule,
        stage: int,
        device: torch.device,
        release: CoreRelease,
        recording: Callable[[Unit], AbstractContextManager[object]] = lambda unit: nullcontext(),
    ):
        self.losses: list[Any] = []
        self.tokens = torch.zeros([], dtype=torch.int, device=device)
        self._batch = batch
        self._stage, self._places = stage, schedule.places
        self._sync: Sync = GradSync(batch.config, batch.model, schedule, stage)
        self._device = device
        self._backward_arguments: dict[str, Any] = {"config": batch.config}
        if release.backward_takes("model_type"):
            self._backward_arguments["model_type"] = get_model_type(batch.model[0])
        if release.backward_takes("pipeline_model_parallel_size"):
            self._backward_arguments["pipeline_model_parallel_size"] = schedule.stages
        kinds = [action.kind for action in schedule.actions[stage]]
        split = WEIGHT_GRADIENT in kinds
        self._weight_gradients = [WeightGradients(chunk, recording) for chunk in batch.model] if split else []
        self._outstanding = [*takewhile(lambda kind: kind not in (BACKWARD, INPUT_GRADIENT), kinds)].count(FORWARD)
        self._forwards = 0
        self._inputs: dict[Unit, list[Tensor | None]] = {}
        self._outputs: dict[Unit, list[Tensor]] = {}
        self._handed_over: dict[Unit, Sequence[tuple[int, ...]]] = {}

    def start(self) -> None:
        """Before the first action."""
        self._sync.start()
        for of_chunk in self._weight_gradients:
            of_chunk.begin()

    def finish(self) -> None:
        """After the last action."""
        self.leave_off()
        self._sync.finish()

    def leave_off(self) -> None:
        """After an action, if it was the last one or failed: the model is as it was before the first."""
        for of_chunk in self._weight_gradients:
            of_chunk.end()

    def receive_buffers(self, kind: Kind, unit: Unit) -> list[Tensor]:
        """Tensors of Megatron's pipeline shapes (sequence, micro-batch size, hidden) and dtype.

        With `variable_seq_lengths` the gradient of an output is shaped like that, whose forward is over by then.
        """
        if kind == FORWARD:
            return self._buffers(self._batch.receive_shapes)
        return self._buffers(self._handed_over.pop(unit, self._batch.send_shapes))

    def description(self, unit: Unit, outputs: list[Tensor]) -> list[int]:
        """Their shapes; all have Megatron's pipeline dtype."""
        return shapes_sent(outputs)

    def buffers_like(self, unit: Unit, description: Sequence[int]) -> list[Tensor]:
        """Return fresh buffers of the shapes in `description`."""
        return self._buffers(shapes_received(description))

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """Megatron's `forward_step`; the output is handed over as an alias, since Megatron frees it right away."""
        batch, config = self._batch, self._batch.config
        self._sync.before_forward()
        number = unit.micro_batch % batch.num_microbatches
        is_last = (self._stage, unit.chunk) == self._places.last
        given: list[Tensor | None] = [None] if inputs is None else list(inputs)
        outputs, tokens = schedules.forward_step(
            batch.forward_step_func,
            batch.data_iterators[unit.chunk],
            batch.model[unit.chunk],
            batch.num_microbatches,
            given,
            self.losses,
            config,
            cp_group_size=batch.context_parallel_size,
            collect_non_loss_data=batch.collect_non_loss_data,
            checkpoint_activations_microbatch=self._recomputes_all(),
            is_first_microbatch=number == 0,
            current_microbatch=number,
            vp_stage=unit.chunk if self._places.chunks > 1 else None,
            is_last_stage=is_last,
        )
        self.tokens += tokens
        self._forwards += 1
        self._inputs[unit], self._outputs[unit] = given, outputs
        if is_last:
            return []
        handed_over = [output.detach() for output in outputs]
        shapes = [tuple(output.shape) for output in outputs] if config.variable_seq_lengths else batch.send_shapes
        check_sent(handed_over, [(tuple(shape), config.pipeline_dtype) for shape in shapes], unit)
        if config.variable_seq_lengths:
            self._handed_over[unit] = shapes
        schedules.deallocate_output_tensor(outputs[0], config.deallocate_pipeline_outputs)
        return handed_over

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """Megatron's `backward_step`."""
        if self._weight_gradients:
            found = self.backward_input(unit, gradients)
            self.backward_weight(unit)
            return found
        self._sync.before_backward()
        found = self._backward_step(unit, gradients)
        self._sync.after_backward()
        return found

    def backward_input(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """Megatron's `backward_step` without the weights of linear layers."""
        self._sync.before_backward()
        found = self._weight_gradients[unit.chunk].leave(unit, lambda: self._backward_step(unit, gradients))
        self._sync.after_backward()
        return found

    def backward_weight(self, unit: Unit) -> None:
        """Compute what `backward_input` left: the gradients of linear layers' weights."""
        self._sync.before_backward()
        self._weight_gradients[unit.chunk].compute(unit)
        self._sync.after_backward()

    def _backward_step(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        given, outputs = self._inputs.pop(unit), self._outputs.pop(unit)
        upstream: list[Tensor | None] = [None] * len(outputs) if gradients is None else list(gradients)
        results = schedules.backward_step(given, outputs, upstream, **self._backward_arguments)
        return [result for result in results if result is not None]

    def _buffers(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        dtype = self._batch.config.pipeline_dtype
        return [torch.empty(shape, dtype=dtype, device=self._device, requires_grad=True) for shape in shapes]

    def _recomputes_all(self) -> bool | None:
        """Return whether this forward recomputes all layers; None unless that differs between micro-batches."""
        partial = self._batch.config.num_microbatches_with_partial_activation_checkpoints
        return None if partial is None else self._forwards % self._outstanding >= partial
