"""Carries out one stage's lowered program, batch after batch, or as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from evenpipe.runtime.flow import Flow
from evenpipe.runtime.forward_only import forward_only
from evenpipe.runtime.memory import SlotPool
from evenpipe.runtime.resources import Observer, Resources
from evenpipe.runtime.stage import Stage, Stepping
from evenpipe.schedule import SWAP_OUT, Places, Program, Step

__all__ = ["Executor", "Observer"]

_MIB: Final = 1 << 20


class Executor(Resources):
    """One stage's side of a pipeline, for any number of batches, each on its own or all in one stream."""

    _aside_reported = False
    _host_reported = 0  # bytes
    _no_swaps_reported = False
    _broken = False
    _stream: Flow | None = None

    def run(self, program: Program, stage: Stage) -> None:
        """Carry out one batch. Return when nothing of it is under way and nothing evicted or accepted is left.

        Raises what the stage raises; the links then hold half of a batch, so every later run raises RuntimeError.
        """
        with self.batch(program, stage) as take:
            for step in program.steps[self.stage_index]:
                take(step)

    @contextmanager
    def batch(self, program: Program, stage: Stage) -> Iterator[Callable[[Step], None]]:
        """Give the function that carries out one step of this batch; the caller passes each of this stage's in turn."""
        with self._batch():
            flow = Flow(self, program, stage)
            self._report_no_swaps(program)
            yield flow.take
            for message in program.drain[self.stage_index]:
                flow.complete(message)
            self._assert_no_guests()

    @contextmanager
    def stretch(self, program: Program, stage: Stage, stepping: Stepping) -> Iterator[Callable[[Step], None]]:
        """Give the function that carries out one step of a stream; transfers under way at the end stay so.

        `program` is a stretch of the same stream, and says what a stage evicts and accepts. A stream that is under way
        goes on with the stage that it began with. Raises as `run` does.
        """
        with self._batch():
            if self._stream is None:
                self._stream = Flow(self, program, stage, stepping)
            yield self._stream.take

    def break_off(self, owed: Iterable[Step]) -> None:
        """End the stream, at the same point on all stages, and forget what has been forwarded and not backwarded.

        `owed` are the transfers that a partner has started and that this stage has not. Nothing is under way
        afterwards; the memory is free when the stage has let go of its inputs and outputs too.
        """
        with self._whole():
            flow, self._stream = self._stream, None
            if flow is not None:
                flow.break_off(owed)
                for swaps in (self.keeper, self.swaps):
                    if swaps is not None:
                        swaps.forget()
                self._assert_no_guests()

    def forward_only(self, places: Places, micro_batches: int, stage: Stage) -> None:
        """Carry out the forwards of one batch, under no order but their own: whatever the schedule, without backwards.

        Nothing of a batch or stream may be under way. Raises as `run` does.
        """
        with self._whole():
            forward_only(self, places, micro_batches, stage)

    def give_back_host_memory(self) -> None:
        """Between batches: give back the host's memory that swaps have used; those that follow take what they need."""
        if self.swaps is not None:
            self.swaps.link.memory.give_back()
            self._host_reported = 0

    def forget_sizes(self) -> None:
        """Between batches, on all stages alike: the micro-batches that follow have other sizes than those so far."""
        self.pool = SlotPool(self.device, self.counter)
        self.counter.forget_largest()

    @contextmanager
    def _batch(self) -> Iterator[None]:
        with self._whole():
            self.observer.batch_started(self.clock)
            if self.measure:
                self.exposed.restart()
                self.computed.restart()
            before = self.pool.allocated_bytes
            yield
            self._report_memory(before)
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

    def _report_memory(self, before: int) -> None:
        """Report a pool that has grown from `before`, its size since the first batch, and once what cannot leave."""
        if before and (now := self.pool.allocated_bytes) > before:
            self.observer.remark(
                f"stage {self.stage_index} keeps {now / _MIB:.1f} MiB for what its partner evicts, not "
                f"{before / _MIB:.1f} MiB as before: larger micro-batches, or more of them, than so far"
            )
        if self.swaps is not None and (held := self.swaps.link.memory.nbytes) > 1.1 * self._host_reported:
            self._host_reported = held
            self.observer.remark(self.swaps.line(self.stage_index))
        if not self._aside_reported and (aside := self.store.aside_bytes):
            self._aside_reported = True
            self.observer.remark(
                f"stage {self.stage_index} keeps what layers save on streams of their own, up to {aside:,} bytes of a "
                "micro-batch, and evicts the rest"
            )

    def _report_no_swaps(self, program: Program) -> None:
        """Report once, on the first stage, that a share may be swapped and no stage has the time for it.

        Under a limit nothing is swapped where nothing has to be, which whoever sets the limit reports.
        """
        if self.swaps is None or self.limit is not None or self.stage_index or self._no_swaps_reported:
            return
        if all(action.kind != SWAP_OUT for row in program.schedule.actions for action in row):
            self._no_swaps_reported = True
            self.observer.remark(
                f"nothing is swapped to the host: under {program.schedule.name}, no micro-batch on {len(program.steps)}"
                " stages has the time to leave and to come back beside compute"
            )

    def _assert_no_guests(self) -> None:
        if self.pool.in_use:
            raise RuntimeError(f"stage {self.stage_index} still holds {self.pool.in_use} accepted micro-batches")
