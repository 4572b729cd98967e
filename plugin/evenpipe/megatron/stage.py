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
from evenpipe.megatron.recomputing import recomputing
from evenpipe.megatron.supported import CoreRelease
from evenpipe.megatron.unsupported import captures
from evenpipe.megatron.vee import part_of
from evenpipe.megatron.weight_gradients import linear_weights
from evenpipe.runtime.channel import shapes_received, shapes_sent
from evenpipe.runtime.stage import check_sent
from evenpipe.runtime.weight_gradients import WeightGradients
from evenpipe.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Kind, Places, Schedule, Unit

__all__ = ["Batch", "ForwardStage", "MegatronStage"]


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


class ForwardStage:
    """The forwards of one batch on one stage. `losses` is what a forward-backward function returns.

    `tokens` counts them, on the device.
    """

    def __init__(self, batch: Batch, places: Places, stage: int, device: torch.device):
        self.losses: list[Any] = []
        self.tokens = torch.zeros([], dtype=torch.int, device=device)
        self._batch = batch
        self._stage, self._places = stage, places
        self._part = part_of(places)
        self._device = device
        self._first: dict[int, int] = {}  # of each chunk's micro-batches, where that is not 0

    def receive_buffers(self, kind: Kind, unit: Unit) -> list[Tensor]:
        """Tensors of Megatron's pipeline shapes (sequence, micro-batch size, hidden) and dtype."""
        return self._buffers(self._batch.receive_shapes)

    def description(self, unit: Unit, outputs: list[Tensor]) -> list[int]:
        """Their shapes; all have Megatron's pipeline dtype."""
        return shapes_sent(outputs)

    def buffers_like(self, unit: Unit, description: Sequence[int]) -> list[Tensor]:
        """Return fresh buffers of the shapes in `description`."""
        return self._buffers(shapes_received(description))

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """Return what the next part needs, of whose output nothing else is kept."""
        return self._handed_over(unit, self._forward_step(unit, [None] if inputs is None else list(inputs)))

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """There is none: RuntimeError."""
        raise RuntimeError(f"{unit}: an evaluation has no backward")

    def _forward_step(self, unit: Unit, given: list[Tensor | None], recomputes_all: bool | None = None) -> list[Tensor]:
        """Return the outputs of Megatron's `forward_step`."""
        batch, number = self._batch, unit.micro_batch % self._batch.num_microbatches
        with self._part(unit.chunk):
            outputs, tokens = schedules.forward_step(
                batch.forward_step_func,
                batch.data_iterators[unit.chunk],
                batch.model[unit.chunk],
                batch.num_microbatches,
                given,
                self.losses,
                batch.config,
                cp_group_size=batch.context_parallel_size,
                collect_non_loss_data=batch.collect_non_loss_data,
                checkpoint_activations_microbatch=recomputes_all,
                is_first_microbatch=self._is_first(unit),
                current_microbatch=number,
                vp_stage=unit.chunk if self._places.chunks > 1 else None,
                is_last_stage=(self._stage, unit.chunk) == self._places.last,
            )
        self.tokens += tokens
        found: list[Tensor] = outputs
        return found

    def _is_first(self, unit: Unit) -> bool:
        """Return whether weights are new to the unit's chunk, so that layers that quantise them have to do it anew."""
        return unit.micro_batch % self._batch.num_microbatches == self._first.get(unit.chunk, 0)

    def _handed_over(self, unit: Unit, outputs: list[Tensor]) -> list[Tensor]:
        """Return aliases of the `outputs` for the next part, whose inputs they are where it is on this stage."""
        if (self._stage, unit.chunk) == self._places.last:
            return []
        handed_over = [output.detach().requires_grad_(output.requires_grad) for output in outputs]
        check_sent(handed_over, [(shape, self._batch.config.pipeline_dtype) for shape in self._shapes(outputs)], unit)
        return handed_over

    def _shapes(self, outputs: list[Tensor]) -> list[tuple[int, ...]]:
        """Return the shapes that the `outputs` must have."""
        varies = self._batch.config.variable_seq_lengths
        return [tuple(output.shape) for output in outputs] if varies else [*map(tuple, self._batch.send_shapes)]

    def _buffers(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        dtype = self._batch.config.pipeline_dtype
        return [torch.empty(shape, dtype=dtype, device=self._device, requires_grad=True) for shape in shapes]


class MegatronStage(ForwardStage):
    """One batch on one stage, with backwards.

    `recording(unit)` is entered to save what the second half of a backward needs. Layers of a unit that `recomputes` is
    true of are computed again by its backward.
    """

    def __init__(
        self,
        batch: Batch,
        schedule: Schedule,
        stage: int,
        device: torch.device,
        release: CoreRelease,
        recording: Callable[[Unit], AbstractContextManager[object]] = lambda unit: nullcontext(),
        recomputes: Callable[[Unit], bool] = lambda unit: False,
    ):
        super().__init__(batch, schedule.places, stage, device)
        self._recomputes = recomputes
        self._sync: Sync = GradSync(batch.config, batch.model, schedule, stage)
        self._backward_arguments: dict[str, Any] = {"config": batch.config}
        if release.backward_takes("model_type"):
            self._backward_arguments["model_type"] = get_model_type(batch.model[0])
        if release.backward_takes("pipeline_model_parallel_size"):
            self._backward_arguments["pipeline_model_parallel_size"] = schedule.stages
        row = schedule.actions[stage]
        kinds = [action.kind for action in row]
        self._first = {action.chunk: action.micro_batch for action in reversed(row) if action.kind == FORWARD}
        split = WEIGHT_GRADIENT in kinds
        self._weight_gradients = [
            WeightGradients(chunk, linear_weights(chunk), recording) for chunk in batch.model if split
        ]
        self._outstanding = [*takewhile(lambda kind: kind not in (BACKWARD, INPUT_GRADIENT), kinds)].count(FORWARD)
        self._forwards = 0
        self._inputs: dict[Unit, list[Tensor | None]] = {}
        self._outputs: dict[Unit, list[Tensor]] = {}
        self._sent: dict[Unit, list[tuple[int, ...]]] = {}  # shapes, where they vary

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
        """The same; the gradient of an output is shaped like that, which is over by then, where lengths vary."""
        return self._buffers(self._sent.pop(unit)) if unit in self._sent else super().receive_buffers(kind, unit)

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """Megatron's `forward_step`; the output is handed over as an alias, since Megatron frees it right away."""
        self._sync.before_forward()
        given: list[Tensor | None] = [None] if inputs is None else list(inputs)
        with recomputing(self._batch.model[unit.chunk]) if self._recomputes(unit) else nullcontext():
            outputs = self._forward_step(unit, given, self._recomputes_all())
        self._forwards += 1
        return self._kept(unit, given, outputs)

    def _kept(self, unit: Unit, given: list[Tensor | None], outputs: list[Tensor]) -> list[Tensor]:
        """Keep what a backward starts from; return what the next part needs."""
        config = self._batch.config
        self._inputs[unit], self._outputs[unit] = given, outputs
        handed_over = self._handed_over(unit, outputs)
        if handed_over and config.variable_seq_lengths:
            self._sent[unit] = self._shapes(outputs)
        if handed_over:
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
        with self._part(unit.chunk):  # layers that are recomputed ask where they are
            results = schedules.backward_step(given, outputs, upstream, **self._backward_arguments)
        found = [result for result in results if result is not None]
        # A graph writes the gradient of its input to memory that the next backward's graphs may write again, which
        # Transformer Engine takes to have been sent by then (`_reuse_graph_input_output_buffers`).
        return [result.clone() for result in found] if captures(self._batch.config) else found

    def _recomputes_all(self) -> bool | None:
        """Return whether this forward recomputes all layers; None unless that differs between micro-batches."""
        partial = self._batch.config.num_microbatches_with_partial_activation_checkpoints
        return None if partial is None else self._forwards % self._outstanding >= partial
