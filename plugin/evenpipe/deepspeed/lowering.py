"""EvenPipe's program of one stage as a schedule of DeepSpeed's engine: one instruction an action."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from deepspeed.runtime.pipe import schedule

from evenpipe.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    KINDS,
    ActionKind,
    Kind,
    Program,
    Step,
    Stream,
    Unit,
)

__all__ = ["ACTIONS", "Backward", "Forward", "ProgramSchedule", "StreamSchedule"]


class Forward(schedule.ForwardPass):  # type: ignore[misc]
    """Wait for the input, compute, send the output; `step` says which messages are posted and waited for."""


class Backward(schedule.BackwardPass):  # type: ignore[misc]
    """Wait for the gradient, compute, send the input's gradient."""


def _instruction(row: ActionKind) -> Any:
    """Return the instruction of a kind of action that DeepSpeed has none for."""
    name = row.name.title().replace(" ", "")
    return type(name, (schedule.PipeInstruction,), {"__doc__": f"{row.letter}: {row.name}", "__module__": __name__})


_OTHERS: Mapping[Kind, Any] = MappingProxyType(
    {letter: _instruction(row) for letter, row in KINDS.items() if letter not in (FORWARD, BACKWARD)}
)

#: The instructions that carry a step of EvenPipe's program.
ACTIONS = (Forward, Backward, *_OTHERS.values())


class _Steps(schedule.PipeSchedule):  # type: ignore[misc]
    """`taken` as instructions, and then those that `end` a batch.

    `buffer_of` knows which of the pipeline's `buffers` a micro-batch uses from its forward to its input gradient.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        taken: Sequence[Step],
        buffer_of: Callable[[Unit], int],
        buffers: int,
        end: Sequence[Any],
    ) -> None:
        super().__init__(*sizes)
        self.buffer_of = buffer_of
        self._taken = taken
        self._buffers = buffers
        self._end = end

    def num_pipe_buffers(self) -> int:
        """As many as micro-batches wait for their backward at once; evicted ones keep theirs."""
        return self._buffers

    def steps(self) -> Iterator[list[Any]]:
        """A list of instructions for each action, and one for the end of the batch."""
        for step in self._taken:
            yield list(self._instructions(step))
        yield list(self._end)

    def _instructions(self, step: Step) -> Iterator[Any]:
        kind, unit = step.action.kind, step.action.unit
        if kind == FORWARD:
            if self.is_first_stage or self.is_last_stage:
                yield schedule.LoadMicroBatch(self.buffer_of(unit))
            yield Forward(self.buffer_of(unit), step=step)
        elif kind == BACKWARD:
            yield Backward(self.buffer_of(unit), step=step)
        else:
            yield _OTHERS[kind](step=step)


class ProgramSchedule(_Steps):
    """The steps of stage `stage_id` in `program`, and DeepSpeed's own end of a batch after them."""

    def __init__(self, program: Program, stage_id: int) -> None:
        steps = program.steps[stage_id]
        buffers = _buffers(steps)
        sizes = program.schedule.micro_batches, program.schedule.stages, stage_id
        end = schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()
        super().__init__(sizes, steps, buffers.__getitem__, max(buffers.values()) + 1, end)


class StreamSchedule(_Steps):
    """Stage `stage_id`'s steps in one call of `stream`: `taken`, and the end of a batch whose step is finished later.

    A stage forwards p - 1 - s micro-batches, counted along the stream, ahead of its backwards: it uses its buffers in
    turn.
    """

    def __init__(self, stream: Stream, stage_id: int, taken: Sequence[Step] = ()) -> None:
        buffers = stream.stages - stage_id
        sizes = stream.micro_batches, stream.stages, stage_id
        end = schedule.ReduceGrads(), schedule.OptimizerStep()
        super().__init__(sizes, taken, lambda unit: unit.micro_batch % buffers, buffers, end)


def _buffers(steps: tuple[Step, ...]) -> dict[Unit, int]:
    """Return the lowest buffer that is free at each micro-batch's forward."""
    buffers: dict[Unit, int] = {}
    in_use: set[int] = set()
    for step in steps:
        if step.action.kind == FORWARD:
            lowest = next(number for number in range(len(in_use) + 1) if number not in in_use)
            buffers[step.action.unit] = lowest
            in_use.add(lowest)
        elif step.action.kind in (BACKWARD, INPUT_GRADIENT):
            in_use.remove(buffers[step.action.unit])
    return buffers
