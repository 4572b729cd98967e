"""Forwards and backwards in Megatron's combined step: experts' messages of one hide behind compute of the other.

``--overlap-moe-expert-parallel-comm``: a layer is cut into nodes, and nodes of a forward and of a backward of another
micro-batch take turns on two streams (``combined_1f1b.py`` of megatron-core).
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.core.pipeline_parallel.combined_1f1b import combined_forward_backward_step
from megatron.core.pipeline_parallel.utils import set_streams
from torch import Tensor

from evenpipe.megatron.stage import MegatronStage
from evenpipe.schedule import Unit

__all__ = ["OverlappingStage"]


class _Pass(NamedTuple):
    """A forward or backward of a unit, and what it was sent: inputs, or gradients of outputs; None at an end."""

    unit: Unit
    sent: list[Tensor] | None


class OverlappingStage(MegatronStage):
    """One batch on one stage, whose forwards and backwards are plans that Megatron's combined step carries out."""

    def start(self) -> None:
        """Before the first action."""
        high = getattr(self._batch.config, "high_priority_a2a_comm_stream", False)  # since 0.18
        set_streams(**({"high_priority": True} if high else {}))
        super().start()

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """A plan with none beside it."""
        return self._combined(unit, _Pass(unit, inputs), None)[0]

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """The same."""
        return self._combined(unit, None, _Pass(unit, gradients))[1]

    def forward_and_backward(
        self, unit: Unit, inputs: list[Tensor] | None, other: Unit, gradients: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Two plans whose nodes take turns."""
        return self._combined(unit, _Pass(unit, inputs), _Pass(other, gradients))

    def _combined(
        self, located: Unit, forward: _Pass | None, backward: _Pass | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs of the forward, and the gradients of the backward's inputs.

        `located` is the unit whose part of the model asks where it is: of a pair the forward's.
        """
        batch = self._batch
        given: list[Tensor | None] = [None]
        chunk = number = iterator = model = None
        is_first = False
        if forward is not None:
            self._sync.before_forward()
            chunk, number = forward.unit.chunk, forward.unit.micro_batch
            is_first = self._is_first(forward.unit)
            iterator, model = batch.data_iterators[chunk], batch.model[chunk]
            given = [None] if forward.sent is None else list(forward.sent)
        taken, results, upstream, other = None, None, None, None
        if backward is not None:
            self._sync.before_backward()
            taken, results = self._inputs.pop(backward.unit), self._outputs.pop(backward.unit)
            upstream = [None] * len(results) if backward.sent is None else list(backward.sent)
            other = batch.model[backward.unit.chunk]
        with self._part(located.chunk):
            outputs, tokens, found = combined_forward_backward_step(
                batch.forward_step_func,
                iterator,
                model,
                batch.num_microbatches,
                given,
                self.losses,
                other,
                taken,
                results,
                upstream,
                batch.config,
                f_model_chunk_id=chunk,
                collect_non_loss_data=batch.collect_non_loss_data,
                is_first_microbatch=is_first,
                current_microbatch=number,
            )
        if backward is not None:
            self._sync.after_backward()
        if forward is None:
            return [], [gradient for gradient in found if gradient is not None]
        self.tokens += tokens
        handed_over = self._kept(forward.unit, given, outputs)
        return handed_over, [gradient for gradient in found or () if gradient is not None]
