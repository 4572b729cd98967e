"""What one stage computes and saves for micro-batches of a size, found by doing it (Ada-Grouper §5.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final, cast

import torch
from torch import Tensor

from evenpipe.runtime.channel import Layouts
from evenpipe.runtime.executor import Executor
from evenpipe.runtime.stage import Stage, VaryingStage
from evenpipe.runtime.store import ActivationStore
from evenpipe.schedule import BACKWARD, FORWARD, Link, Schedule, Size, Unit, build
from evenpipe.tuner.group_memory import Measured
from evenpipe.tuner.grouped import average_ms

__all__ = ["DryRun"]

#: Micro-batches that are timed, after those that load kernels and fill caches, which are weighed.
_WEIGHED: Final = 2
_TIMED: Final = 4


class DryRun:
    """One stage forwards and backwards micro-batches alone: no neighbour is waited for or sent to.

    What it computes with is made up where a neighbour would give it, so all it leaves behind is of no use. Only shapes,
    where they vary, hosts tell each other as in a batch.
    `parameters` are not counted as saved. `fits` says whether so many bytes of activations may be held; all ranks ask
    it alike.
    """

    def __init__(
        self, executor: Executor, stages: int, parameters: Sequence[Tensor], fits: Callable[[int], bool]
    ) -> None:
        self._clock = executor.clock
        self._layouts = executor.layouts
        self._device = executor.device
        self._stage = executor.stage_index
        self._stages = stages
        self._parameters = parameters
        self._fits = fits
        self._shared_bytes: int | None = None

    def measured(self, make: Callable[[Schedule], Stage], workspace: Callable[[], int], different: int = 0) -> Measured:
        """Return what micro-batches take and hold here, but for what stays from batch to batch, which is 0.

        `make` gives the stage that trains on micro-batches of a schedule; `workspace` what it keeps of memory beside
        what autograd saves, when some have been weighed.

        Of the first size, two are held at a time, if they fit, which shows what micro-batches share (such as a causal
        mask); else they are taken to share nothing. Of others one is. Where a batch has so many `different` ones, as
        with experts or lengths that vary, all are, one by one, and the largest counts: what two of them save says
        nothing of what they share. Times are the largest one's too: as much longer than the mean as its messages are.
        """
        weighed, timed = (different, max(different, _TIMED)) if different else (_WEIGHED, _TIMED)
        # One micro-batch more than are used: with the last one, replicas would begin to reduce gradients.
        stage = make(build("gpipe", Size(self._stages, weighed + timed + 1)).schedule)
        alone = _Alone(stage, self._stage, self._stages, self._layouts)
        if different:
            each, shared = max(self._weighed(alone, [Unit(number)])[0] for number in range(weighed)), 0
        else:
            each, shared = self._shared(alone)
        workspace_bytes = workspace()
        marks = [self._timed(alone, Unit(weighed + number)) for number in range(timed)]
        longest = max(alone.message_bytes)
        stretch = longest / fmean(alone.message_bytes[-timed:])
        forward_ms = stretch * average_ms(self._clock.elapsed_ms(*forward) for forward, _ in marks)
        backward_ms = stretch * average_ms(self._clock.elapsed_ms(*backward) for _, backward in marks)
        return Measured(forward_ms, backward_ms, each, shared, longest, workspace_bytes, 0)

    def _shared(self, alone: _Alone) -> tuple[int, int]:
        """Return bytes that a micro-batch saves, and that are shared."""
        if self._shared_bytes is None:
            saved = self._weighed(alone, [Unit(0), Unit(1)])
            self._shared_bytes = saved[0] - saved[-1]
            return saved[-1], self._shared_bytes
        [first] = self._weighed(alone, [Unit(0)])
        return first - self._shared_bytes, self._shared_bytes

    def _weighed(self, alone: _Alone, units: Sequence[Unit]) -> list[int]:
        """Bytes that each of the units saves while those before are held, as far as they fit; the first always does."""
        store = ActivationStore(self._parameters, device=self._device)
        saved: list[int] = []
        for unit in units:
            if saved and not self._fits(2 * saved[0]):
                break
            inputs = alone.inputs(unit)
            with store.recording(unit):
                outputs = alone.stage.forward(unit, inputs)
            alone.tell(unit, inputs, outputs)
            saved.append(store.nbytes(unit))
        for unit in units[: len(saved)]:
            alone.stage.backward(unit, alone.gradients(unit))
        return saved

    def _timed(self, alone: _Alone, unit: Unit) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Return the clock's marks before and after the unit's forward, and before and after its backward."""
        inputs = alone.inputs(unit)
        start = self._clock.mark()
        outputs = alone.stage.forward(unit, inputs)
        forward = start, self._clock.mark()
        alone.tell(unit, inputs, outputs)
        gradients = alone.gradients(unit)
        start = self._clock.mark()
        alone.stage.backward(unit, gradients)
        return forward, (start, self._clock.mark())


class _Alone:
    """A stage, and what its neighbours would give it: numbers of a usual size, as others may be slow.

    `message_bytes` are those of the messages of each micro-batch so far: the larger one's.
    """

    def __init__(self, stage: Stage, index: int, stages: int, layouts: Mapping[Link, Layouts]) -> None:
        self.stage = stage
        self.message_bytes: list[int] = []
        self._is_first, self._is_last = index == 0, index == stages - 1
        self._receiving = layouts.get(Link("forward", index - 1, index))
        self._sending = layouts.get(Link("forward", index, index + 1))

    def inputs(self, unit: Unit) -> list[Tensor] | None:
        if self._is_first:
            return None
        if self._receiving is None:
            return _made_up(self.stage.receive_buffers(FORWARD, unit))
        return _made_up(cast(VaryingStage, self.stage).buffers_like(unit, self._receiving.receive()))

    def tell(self, unit: Unit, inputs: list[Tensor] | None, outputs: list[Tensor]) -> None:
        """After a forward."""
        self.message_bytes.append(max(sum(one.nbytes for one in given) for given in (inputs or [], outputs)))
        if self._sending is not None:
            self._sending.send(cast(VaryingStage, self.stage).description(unit, outputs))

    def gradients(self, unit: Unit) -> list[Tensor] | None:
        """After the forward, which says what they are like."""
        return None if self._is_last else _made_up(self.stage.receive_buffers(BACKWARD, unit))


@torch.no_grad()
def _made_up(buffers: list[Tensor]) -> list[Tensor]:
    return [buffer.normal_() for buffer in buffers]
