"""Carries out one stage's lowered program: compute, messages, evictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from evenpipe.runtime.channel import Transfer
from evenpipe.runtime.clock import Clock, clock_for
from evenpipe.runtime.connections import Connections
from evenpipe.runtime.counters import MemoryCounter
from evenpipe.runtime.layout import Layouts
from evenpipe.runtime.pool import Slot, SlotPool, aligned_bytes
from evenpipe.runtime.stage import Stage, SteppingStage
from evenpipe.runtime.stopwatch import Stopwatch
from evenpipe.runtime.store import ActivationStore
from evenpipe.schedule import (
    ACCEPT,
    BACKWARD,
    EVICT,
    FORWARD,
    LOAD,
    RETURN,
    UPDATE,
    Action,
    Kind,
    Message,
    Program,
    Step,
    Unit,
)

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
        """Nothing of the batch is under way any more. Not said of a batch that failed."""


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
        self._stream: _Flow | None = None

    def run(self, program: Program, stage: Stage) -> None:
        """Carry out one batch. Returns when nothing of it is under way and nothing evicted or accepted is left.

        Raises what the stage raises; the links then hold half of a batch, so every later run raises RuntimeError.
        """
        with self._batch():
            flow = _Flow(self, program, stage)
            for step in program.steps[self.stage_index]:
                flow.take(step)
            for message in program.drain[self.stage_index]:
                flow.complete(message)
            self._assert_no_guests()

    def advance(self, program: Program, steps: Iterable[Step], stage: SteppingStage) -> None:
        """Carry out the next `steps` of a stream, such as those of one batch; what is under way stays so.

        `program` is a stretch of the same stream, and says what a stage evicts and accepts. Raises as `run` does.
        """
        with self._batch():
            if self._stream is None:
                self._stream = _Flow(self, program, stage)
            self._stream.stage, self._stream.update = stage, stage.update
            for step in steps:
                self._stream.take(step)

    def break_off(self, owed: Iterable[Step]) -> None:
        """End the stream, at the same point on all stages, and forget what has been forwarded and not backwarded.

        `owed` are the transfers that a partner has started and that this stage has not. Nothing is under way
        afterwards; the memory is free when the stage has let go of its inputs and outputs too.
        """
        flow, self._stream = self._stream, None
        if flow is not None:
            flow.break_off(owed)
            self._assert_no_guests()

    @contextmanager
    def _batch(self) -> Iterator[None]:
        if self._broken:
            raise RuntimeError(f"stage {self.stage_index} failed in an earlier batch: start the processes anew")
        self._broken = True
        self.observer.batch_started(self.clock)
        if self.measure:
            self.exposed.restart()
        yield
        self.observer.batch_ended()
        self._broken = False

    def _assert_no_guests(self) -> None:
        if self.pool.in_use:
            raise RuntimeError(f"stage {self.stage_index} still holds {self.pool.in_use} accepted micro-batches")


class _Flow:
    """What is under way in a batch, or in a stream of batches."""

    def __init__(self, executor: Executor, program: Program, stage: Stage) -> None:
        self.executor = executor
        self.stage = stage
        self.update: Callable[[int], None] = _no_update
        self.channels = executor.connections.channels
        self.evicts = program.schedule.evictions[executor.stage_index] > 0
        self.slots_needed = _most_accepted(program.steps[executor.stage_index])
        self.under_way: dict[Message, Transfer] = {}
        self.actions: dict[Message, Action] = {}
        self.received: dict[Message, list[Tensor]] = {}
        self.slots: dict[Unit, Slot] = {}
        self.wait_exposed: Callable[[Transfer], None] = executor.exposed.wait if executor.measure else Transfer.wait
        self.start_transfer = {EVICT: self.evict, LOAD: self.load, ACCEPT: self.accept, RETURN: self.give_back}

    def take(self, step: Step) -> None:
        """Post, complete, transfer, compute or update, send."""
        action = step.action
        for message in step.post:
            kind: Kind = FORWARD if message.link.kind == "forward" else BACKWARD
            buffers = self.stage.receive_buffers(kind, Unit(message.micro_batch, message.chunk))
            self.received[message] = buffers
            self.receive(message, buffers)
        for message in step.complete:
            self.complete(message)
        if step.transfer is not None:
            self.actions[step.transfer] = action
            self.start_transfer[action.kind](step.transfer, action.unit)
            self.executor.observer.started(action)
            return
        self.executor.observer.started(action)
        if action.kind == UPDATE:
            self.update(action.micro_batch)
            self.executor.observer.ended(action)
            return
        results = self.forward(action.unit, step) if action.kind == FORWARD else self.backward(action.unit, step)
        self.executor.observer.ended(action)
        if step.send is not None:
            self.send(step.send, results)

    def receive(self, message: Message, buffers: list[Tensor]) -> None:
        self.under_way[message] = self.channels[message.link].receive(buffers)

    def send(self, message: Message, tensors: list[Tensor]) -> None:
        self.under_way[message] = self.channels[message.link].send(tensors)

    def evict(self, message: Message, unit: Unit) -> None:
        self.send(message, self.executor.store.ship(unit))

    def load(self, message: Message, unit: Unit) -> None:
        self.receive(message, self.executor.store.refill(unit))

    def accept(self, message: Message, unit: Unit) -> None:
        sizes = self.sizes(unit.chunk)
        self.executor.pool.reserve(self.slots_needed, aligned_bytes(sizes))
        self.slots[unit] = self.executor.pool.acquire(aligned_bytes(sizes))
        self.receive(message, self.slots[unit].parts(sizes))

    def give_back(self, message: Message, unit: Unit) -> None:
        self.send(message, self.slots[unit].parts(self.sizes(unit.chunk)))

    def complete(self, message: Message) -> None:
        """Wait for `message`, and let go of what has left this stage with it."""
        transfer = self.under_way.pop(message)
        action = self.actions.pop(message, None)
        if action is None:
            transfer.wait()
            return
        self.wait_exposed(transfer)
        if action.kind == EVICT:
            self.executor.store.release(action.unit)
        elif action.kind == RETURN:
            self.executor.pool.release(self.slots.pop(action.unit))
        self.executor.observer.ended(action)

    def break_off(self, owed: Iterable[Step]) -> None:
        """Take part in what partners have started, see everything through, and let go of it."""
        for step in owed:
            assert step.transfer is not None
            for message in step.complete:
                if message in self.under_way:
                    self.complete(message)
            self.actions[step.transfer] = step.action
            self.start_transfer[step.action.kind](step.transfer, step.action.unit)
        for transfer in self.under_way.values():
            transfer.wait()
        for slot in self.slots.values():
            self.executor.pool.release(slot)

    def forward(self, unit: Unit, step: Step) -> list[Tensor]:
        store = self.executor.store
        inputs = self.inputs(step)
        if not (self.evicts or self.executor.measure):
            return self.stage.forward(unit, inputs)
        with store.recording(unit):
            outputs = self.stage.forward(unit, inputs)
            for tensor in inputs or ():
                store.attach(unit, tensor)
        if self.evicts and self.executor.layouts is not None:
            self.executor.layouts.tell(unit.chunk, store.seal(unit))
        return outputs

    def backward(self, unit: Unit, step: Step) -> list[Tensor]:
        return self.stage.backward(unit, self.inputs(step))

    def inputs(self, step: Step) -> list[Tensor] | None:
        """What this step's compute received from its neighbour; None at the model's ends."""
        messages = [message for message in step.complete if message in self.received]
        return self.received.pop(messages[0]) if messages else None

    def sizes(self, chunk: int) -> tuple[int, ...]:
        assert self.executor.layouts is not None, "a schedule with transfers needs connections with bpipe"
        return self.executor.layouts.sizes(chunk)


def _no_update(batch: int) -> None:
    raise RuntimeError(f"nobody steps batch {batch}: schedules with updates are carried out by advance")


def _most_accepted(steps: Iterable[Step]) -> int:
    """How many slots an acceptor's pool needs: from the accept until the return is known to be complete."""
    held = most = 0
    for step in steps:
        held -= sum(message.link.kind == "load" for message in step.complete)
        held += step.action.kind == ACCEPT
        most = max(most, held)
    return most
