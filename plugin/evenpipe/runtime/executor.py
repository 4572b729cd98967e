"""Carries out one stage's lowered program: compute, messages, evictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from evenpipe.runtime.flow import Flow
from evenpipe.runtime.forward_only import forward_only
from evenpipe.runtime.memory import SlotPool
from evenpipe.runtime.resources import Observer, Resources
from evenpipe.runtime.stage import Stage, SteppingStage
from evenpipe.schedule import Program, Schedule, Step

__all__ = ["Executor", "Observer"]

_MIB: Final = 1 << 20


class Executor(Resources):
    """One stage's side of a pipeline, for any number of batches, each on its own or all in one stream."""

    _aside_told = False
    _broken = False
    _stream: Flow | None = None

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

    def forward_only(self, schedule: Schedule, stage: Stage) -> None:
        """Carry out the forwards of one batch, under no order but their own: whatever the schedule, without backwards.

        Nothing of a batch or stream may be under way. Raises as `run` does.
        """
        with self._whole():
            forward_only(self.connections.channels, schedule, self.stage_index, stage)

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
            self._stream.go_on_with(stage)
            yield self._stream.take

    def forget_sizes(self) -> None:
        """Between batches, on all stages alike: the micro-batches that follow have other sizes than those so far."""
        self.pool = SlotPool(self.device, self.counter)
        self.counter.forget_largest()

    def break_off(self, owed: Iterable[Step]) -> None:
        """End the stream, at the same point on all stages, and forget what has been forwarded and not backwarded.

        `owed` are the transfers that a partner has started and that this stage has not. Nothing is under way
        afterwards; the memory is free when the stage has let go of its inputs and outputs too.
        """
        with self._whole():
            flow, self._stream = self._stream, None
            if flow is not None:
                flow.break_off(owed)
                if self.keeper is not None:
                    self.keeper.forget()
                self._assert_no_guests()

    @contextmanager
    def _batch(self) -> Iterator[None]:
        with self._whole():
            self.observer.batch_started(self.clock)
            if self.measure:
                self.exposed.restart()
                self.computed.restart()
            before = self.pool.allocated_bytes
            yield
            self._tell_if_grown(before)
            self._tell_what_stays()
            self.observer.batch_ended()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Inside, links and slots hold half of something, which is what stays of it after any error."""
        if self._broken:
            raise RuntimeError(f"stage {self.stage_index} failed in an earlier batch: start the processes anew")
        self._broken = True
        try:
            yield
        except BaseException:
            self.connections.give_up()
            raise
        self._broken = False

    def _tell_if_grown(self, before: int) -> None:
        """The pool is as large as the first batch needs, and then as later ones do."""
        if before and (now := self.pool.allocated_bytes) > before:
            self.observer.remark(
                f"stage {self.stage_index} keeps {now / _MIB:.1f} MiB for what its partner evicts, not "
                f"{before / _MIB:.1f} MiB as before: larger micro-batches, or more of them, than so far"
            )

    def _tell_what_stays(self) -> None:
        if not self._aside_told and (aside := self.store.aside_bytes):
            self._aside_told = True
            self.observer.remark(
                f"stage {self.stage_index} keeps what layers save on streams of their own, up to {aside:,} bytes of a "
                "micro-batch, and evicts the rest"
            )

    def _assert_no_guests(self) -> None:
        if self.pool.in_use:
            raise RuntimeError(f"stage {self.stage_index} still holds {self.pool.in_use} accepted micro-batches")
