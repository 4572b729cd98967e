"""What is under way on one stage, in a batch or in a stream of batches: steps are taken, and broken off."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from evenpipe.runtime.channel import Transfer
from evenpipe.runtime.pool import Slot, aligned_bytes
from evenpipe.runtime.stage import Stage
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

if TYPE_CHECKING:
    from evenpipe.runtime.executor import Executor

__all__ = ["Flow"]


class Flow:
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
        if self.executor.measure:
            self.executor.exposed.wait(transfer)
        else:
            transfer.wait()
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
            self.executor.observer.started(step.action)
        for message in list(self.under_way):
            self.complete(message)
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
