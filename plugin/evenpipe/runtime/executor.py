"""Carries out one stage's lowered program: compute, messages, evictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from evenpipe.runtime.clock import Clock, clock_for
from evenpipe.runtime.connections import Connections
from evenpipe.runtime.counters import MemoryCounter
from evenpipe.runtime.flow import Flow
from evenpipe.runtime.layout import Layouts
from evenpipe.runtime.pool import SlotPool
from evenpipe.runtime.stage import Stage, SteppingStage
from evenpipe.runtime.stopwatch import Stopwatch
from evenpipe.runtime.store import ActivationStore
from evenpipe.schedule import Action, Program, Step

__all__ = ["Executor", "Observer"]


class Observer:
    """Is told what a stage does, and takes no notice: to be overridden."""

    def batch_started(self, clock: Clock) -> None:
        """Nothing of the batch is under way yet. `clock` times this stage's compute."""

    def started(self, action: Action) -> None:
        """Compute starts, or a transfer is under way."""

    def ended(self, action: Action) -> None:
        """Compute has ended, or a transfer has been waited for."""

    def batch_ended(self) -> None:
        """All of the batch's actions are done; in a stream, some of the next one's too. Not said of one that failed."""


class Executor:
    """One stage's side of a pipeline, for any number of batches, each on its own or all in one stream.

    Holds what outlives a batch: the connections, the acceptor's pool, the layout of evicted micro-batches and the
    memory counter. `parameters` are left out of what is saved and counted. Without `measure`, own activations are
    recorded (some 2 µs a saved tensor) on evicting stages only, and the counter knows of nothing else. `exposed` has
    how long compute waited for evictions and loads, on either side, in the last batch that was measured.
    """

    def __init__(
        self,
        stage_index: int,
        connections: Connections,
        device: torch.device,
        parameters: Iterable[Tensor] = (),
        observer: Observer | None = None,
        measure: bool = True,
    ) -> None:
        self.stage_index = stage_index
        self.device = device
        self.connections = connections
        self.counter = MemoryCounter()
        self.store = ActivationStore(parameters, self.counter, device)
        self.pool = SlotPool(device, self.counter)
        self.layouts = Layouts(connections.layouts) if connections.layouts is not None else None
        self.observer = observer if observer is not None else Observer()
        self.measure = measure
        self.clock = clock_for(device)
        self.exposed = Stopwatch(self.clock)
        self._broken = False
        self._stream: Flow | None = None

    def run(self, program: Program, stage: Stage) -> None:
        """Carry out one batch. Returns when nothing of it is under way and nothing evicted or accepted is left.

        Raises what the stage raises; the links then hold half of a batch, so every later run raises RuntimeError.
        """
        with self.batch(program, stage) as take:
            for step in program.steps[self.stage_index]:
                take(step)

    @contextmanager
    def batch(self, program: Program, stage: Stage) -> Iterator[Callable[[Step], None]]:
        """The same for a caller who walks the steps of this stage: gives what carries out the next of them."""
        with self._batch():
            flow = Flow(self, program, stage)
            yield flow.take
            for message in program.drain[self.stage_index]:
                flow.complete(message)
            self._assert_no_guests()

    def advance(self, program: Program, steps: Iterable[Step], stage: SteppingStage) -> None:
        """Carry out the next `steps` of a stream, such as those of one batch; what is under way stays so.

        `program` is a stretch of the same stream, and says what a stage evicts and accepts. Raises as `run` does.
        """
        with self.stretch(program, stage) as take:
            for step in steps:
                take(step)

    @contextmanager
    def stretch(self, program: Program, stage: SteppingStage) -> Iterator[Callable[[Step], None]]:
        """The same for a caller who walks the steps of this stage: gives what carries out the next of them."""
        with self._batch():
            if self._stream is None:
                self._stream = Flow(self, program, stage)
            self._stream.stage, self._stream.update = stage, stage.update
            yield self._stream.take

    def forget_sizes(self) -> None:
        """Between batches, on all stages alike: the micro-batches that follow have other sizes than those so far."""
        self.pool = SlotPool(self.device, self.counter)
        if self.connections.layouts is not None:
            self.layouts = Layouts(self.connections.layouts)

    def break_off(self, owed: Iterable[Step]) -> None:
        """End the stream, at the same point on all stages, and forget what has been forwarded and not backwarded.

        `owed` are the transfers that a partner has started and that this stage has not. Nothing is under way
        afterwards; the memory is free when the stage has let go of its inputs and outputs too.
        """
        self._assert_whole()
        flow, self._stream = self._stream, None
        if flow is not None:
            flow.break_off(owed)
            self._assert_no_guests()

    @contextmanager
    def _batch(self) -> Iterator[None]:
        self._assert_whole()
        self._broken = True
        self.observer.batch_started(self.clock)
        if self.measure:
            self.exposed.restart()
        yield
        self.observer.batch_ended()
        self._broken = False

    def _assert_whole(self) -> None:
        if self._broken:
            raise RuntimeError(f"stage {self.stage_index} failed in an earlier batch: start the processes anew")

    def _assert_no_guests(self) -> None:
        if self.pool.in_use:
            raise RuntimeError(f"stage {self.stage_index} still holds {self.pool.in_use} accepted micro-batches")
