"""What is under way on one stage, in a batch or in a stream of batches: steps are taken, and broken off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Final, NamedTuple, cast

from torch import Tensor, UntypedStorage

from evenpipe.runtime.channel import Transfer
from evenpipe.runtime.memory import Slot, aligned_bytes
from evenpipe.runtime.resources import Resources
from evenpipe.runtime.stage import SplitStage, Stage, SteppingStage, VaryingStage
from evenpipe.runtime.timing import Stopwatch
from evenpipe.schedule import (
    ACCEPT,
    BACKWARD,
    EVICT,
    FORWARD,
    INPUT_GRADIENT,
    LOAD,
    RETURN,
    SWAP_IN,
    SWAP_OUT,
    UPDATE,
    WEIGHT_GRADIENT,
    Action,
    Gathering,
    Kind,
    Message,
    Program,
    Step,
    Unit,
)

__all__ = ["Flow"]

# Methods by name: a flow that held its own, bound, would keep its stage, and what that reads from, until the garbage
# collector comes.
_START: Final[Mapping[Kind, str]] = {
    EVICT: "evict",
    LOAD: "load",
    ACCEPT: "accept",
    RETURN: "give_back",
    SWAP_OUT: "swap_out",
    SWAP_IN: "swap_in",
}
_COMPUTE: Final[Mapping[Kind, str]] = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_GRADIENT: "input_gradient",
    WEIGHT_GRADIENT: "weight_gradient",
    UPDATE: "update_weights",
}


class _Guest(NamedTuple):
    """An accepted micro-batch: its slot, and the message there."""

    slot: Slot
    tensors: list[Tensor]


class _Departed(NamedTuple):
    """A departure that another transfer follows: it is through when that starts, and has been let go of."""

    transfer: Transfer
    action: Action
    vacated: list[UntypedStorage]


class Flow:
    """What is under way in a batch, or in a stream of batches."""

    def __init__(self, resources: Resources, program: Program, stage: Stage) -> None:
        self.resources = resources
        self.stage = stage
        self.update: Callable[[int], None] = _no_stream
        self.gather: Callable[[int], None] = _no_stream
        self.channels = resources.connections.channels
        self.layouts = resources.layouts
        self.evicts = program.schedule.evictions[resources.stage_index] > 0
        self.keeper = resources.keeper
        self.records = self.evicts or resources.measure or self.keeper is not None
        self.slots_needed = _most_accepted(program.steps[resources.stage_index])
        self.under_way: dict[Message, Transfer] = {}
        self.actions: dict[Message, Action] = {}
        self.received: dict[Message, list[Tensor]] = {}
        self.followed: dict[Message, list[_Departed]] = {}
        self.guests: dict[Unit, _Guest] = {}

    def go_on_with(self, stage: SteppingStage) -> None:
        """Carry out what follows in the stream by `stage`, which also gathers figures and updates weights."""
        self.stage, self.update, self.gather = stage, stage.update, stage.gather

    def take(self, step: Step) -> None:
        """Post, complete, transfer, compute or update, post what comes before the send, send."""
        action = step.action
        self.post(step.post)
        for message in step.complete:
            self.complete(message)
        if step.transfer is not None:
            self.start(step.transfer, step)
            self.post(step.then_post)
            return
        taken = None if step.takes is None else self.received.pop(step.takes)
        self.resources.observer.started(action)
        with self.resources.computed.running() if self.resources.measure else nullcontext():
            results: list[Tensor] = getattr(self, _COMPUTE[action.kind])(action.unit, taken)
        self.resources.observer.ended(action)
        self.post(step.then_post)
        if step.send is not None:
            self.hand_on(step.send, action.unit, results)

    def post(self, items: Iterable[Message | Gathering]) -> None:
        """Receive what the stage takes from neighbours; start what all stages exchange."""
        for item in items:
            if isinstance(item, Gathering):
                self.gather(item.batch)
                continue
            kind: Kind = FORWARD if item.link.kind == "forward" else BACKWARD
            unit = Unit(item.micro_batch, item.chunk)
            if item.link in self.layouts:
                told = self.layouts[item.link].next()
                self.received[item] = cast(VaryingStage, self.stage).buffers_like(unit, told)
            else:
                self.received[item] = self.stage.receive_buffers(kind, unit)
            self.receive(item, self.received[item])

    def hand_on(self, message: Message, unit: Unit, results: list[Tensor]) -> None:
        """Send the `results` of `unit`, or keep them for the next part of the model, where that is on this stage."""
        if not message.is_local:
            if self.resources.measure:
                self.resources.counter.note_sent(sum(result.nbytes for result in results))
            if message.link in self.layouts:
                self.layouts[message.link].tell(cast(VaryingStage, self.stage).description(unit, results))
            self.send(message, results)
        elif message.link.kind == "forward":
            self.received[message] = [_leaf(result) for result in results]
        else:
            self.received[message] = results

    def start(self, message: Message, step: Step) -> None:
        """Start what `step` moves to or from the partner, in the room of what it follows."""
        action = step.action
        self.followed[message] = [self.departed(one) for one in step.follows]
        self.actions[message] = action
        getattr(self, _START[action.kind])(message, action.unit)
        self.resources.observer.started(action)

    def departed(self, message: Message) -> _Departed:
        """Let go of what leaves this stage with `message`, which may still be under way."""
        action = self.actions.pop(message)
        return _Departed(self.under_way.pop(message), action, self.let_go(action))

    def let_go(self, action: Action) -> list[UntypedStorage]:
        """Give up what a transfer has moved from this stage; the memory, where that was the micro-batch's own."""
        if action.kind == EVICT:
            return self.resources.store.release(action.unit)
        if action.kind == RETURN:
            self.resources.pool.release(self.guests.pop(action.unit).slot)
        return []

    def receive(self, message: Message, buffers: list[Tensor]) -> None:
        after = [one.transfer for one in self.followed.get(message, ())]
        self.under_way[message] = self.channels[message.link].receive(buffers, after)

    def send(self, message: Message, tensors: list[Tensor]) -> None:
        self.under_way[message] = self.channels[message.link].send(tensors)

    def evict(self, message: Message, unit: Unit) -> None:
        tensors = self.resources.store.ship(unit)
        self.layouts[message.link].tell([tensor.numel() for tensor in tensors])
        self.send(message, tensors)

    def load(self, message: Message, unit: Unit) -> None:
        followed, store = self.followed[message], self.resources.store
        vacated = [storage for one in followed for storage in one.vacated]
        for one in followed:
            one.vacated.clear()  # what the load leaves is free with the transfer
        if not store.fits(unit, vacated):  # new memory beside what still leaves would be beyond the bound
            vacated.clear()
            for one in followed:
                self.wait(one.transfer)
        self.receive(message, store.refill(unit, vacated))

    def accept(self, message: Message, unit: Unit) -> None:
        sizes = self.layouts[message.link].next()
        self.resources.pool.reserve(self.slots_needed, aligned_bytes(sizes))
        slot = self.resources.pool.acquire(aligned_bytes(sizes))
        self.guests[unit] = _Guest(slot, slot.parts(sizes))
        self.receive(message, self.guests[unit].tensors)

    def give_back(self, message: Message, unit: Unit) -> None:
        self.send(message, self.guests[unit].tensors)

    def swap_out(self, message: Message, unit: Unit) -> None:
        """What is swapped has left beside the forward; whoever is left with it lets go of it."""
        self.under_way[message] = Transfer((), ())
        if self.keeper is not None:
            self.keeper.swap_out(unit)

    def swap_in(self, message: Message, unit: Unit) -> None:
        """What the backward needs first starts to come back; the rest comes beside it, and is waited for there."""
        self.under_way[message] = Transfer((), ())
        if self.keeper is not None:
            self.keeper.swap_in(unit)

    def complete(self, message: Message) -> None:
        """Wait for `message`; put what it brought where it belongs, and let go of what has left this stage with it."""
        transfer = self.under_way.pop(message)
        action = self.actions.pop(message, None)
        if action is None:
            self.wait_for_neighbour(message, transfer)
            return
        self.wait(transfer)
        for one in self.followed.pop(message, ()):
            one.transfer.wait()
            self.resources.observer.ended(one.action)
        if action.kind == LOAD:
            self.resources.store.unpack(action.unit)
            if self.keeper is not None:
                self.keeper.swap_in(action.unit)
        self.let_go(action)
        self.resources.observer.ended(action)

    def wait_for_neighbour(self, message: Message, transfer: Transfer) -> None:
        """Wait for what a neighbour sends or takes; whoever wants to know is told how long."""
        waited = self.resources.waited
        if waited is None:
            transfer.wait()
            return
        watch = Stopwatch(self.resources.clock)
        watch.wait(transfer)
        waited(message, message in self.received, watch.total_ms())

    def wait(self, transfer: Transfer) -> None:
        """Wait for what is moved between partners; the time counts where it is measured."""
        if self.resources.measure:
            self.resources.exposed.wait(transfer)
        else:
            transfer.wait()

    def break_off(self, owed: Iterable[Step]) -> None:
        """Take part in what partners have started, see everything through, and let go of it."""
        for step in owed:
            self.post(step.post)
            if step.transfer is None:
                continue
            for message in step.complete:
                if message in self.under_way:
                    self.complete(message)
            started = tuple(message for message in step.follows if message in self.under_way)
            self.start(step.transfer, step._replace(follows=started))
        for message in list(self.under_way):
            self.complete(message)
        for guest in self.guests.values():
            self.resources.pool.release(guest.slot)

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        store = self.resources.store
        if not self.records:
            return self.stage.forward(unit, inputs)
        with store.recording(unit):
            outputs = self.stage.forward(unit, inputs)
            for tensor in inputs or ():
                store.attach(unit, tensor)
        if self.resources.measure:
            self.resources.counter.note_saved(store.nbytes(unit))
        if self.evicts:
            store.seal(unit, like=unit.chunk)
        return outputs

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        return self.stage.backward(unit, gradients)

    def input_gradient(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        return cast(SplitStage, self.stage).backward_input(unit, gradients)

    def weight_gradient(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        cast(SplitStage, self.stage).backward_weight(unit)
        return []

    def update_weights(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """Of an update, the number is the batch's."""
        self.update(unit.micro_batch)
        return []


def _leaf(output: Tensor) -> Tensor:
    """An input like one that was received: where autograd's graph of the next part begins."""
    return output.detach().requires_grad_(output.requires_grad)


def _no_stream(batch: int) -> None:
    raise RuntimeError(f"nobody steps batch {batch}: schedules with updates are carried out stretch by stretch")


def _most_accepted(steps: Iterable[Step]) -> int:
    """How many slots an acceptor's pool needs: from the accept until the return is known to be complete."""
    held = most = 0
    for step in steps:
        held -= sum(message.link.kind == "load" for message in (*step.complete, *step.follows))
        held += step.action.kind == ACCEPT
        most = max(most, held)
    return most
