"""One stage's steps, in a batch or a stream: compute, messages to neighbours, evictions to the partner and loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cached_property
from typing import NamedTuple, cast

from torch import Tensor, UntypedStorage

from evenpipe.runtime.channel import Transfer
from evenpipe.runtime.memory import Slot, aligned_bytes
from evenpipe.runtime.resources import Resources
from evenpipe.runtime.stage import FusingStage, SplitStage, Stage, Stepping, VaryingStage
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
    WEIGHT_GRADIENT,
    Action,
    FusedBackward,
    Gathering,
    Kind,
    Message,
    Program,
    Step,
    Unit,
)

__all__ = ["Flow"]

_Forward = Callable[[Unit, list[Tensor] | None], list[Tensor]]


class _Guest(NamedTuple):
    """An accepted micro-batch: its slot, and its tensors there."""

    slot: Slot
    tensors: list[Tensor]


class _Departed(NamedTuple):
    """A departure that another transfer follows: it is through when that starts, and has been let go of."""

    transfer: Transfer
    action: Action
    vacated: list[UntypedStorage]


class Flow:
    """The transfers and results under way on one stage, in a batch, or in a stream whose weights `stepping` changes."""

    def __init__(self, resources: Resources, program: Program, stage: Stage, stepping: Stepping | None = None) -> None:
        self.resources = resources
        self.stage = stage
        self.stepping = stepping
        self.channels = resources.connections.channels
        self.layouts = resources.layouts
        self.keeper, self.swaps = resources.keeper, resources.swaps_in(program)
        if self.swaps is not None:
            exposed = resources.exposed if resources.measure else None
            self.swaps.begin(program.schedule.actions[resources.stage_index], exposed)
        self.limit = resources.limit if self.swaps is None else None
        if self.limit is not None:
            self.limit.begin(program.schedule.actions[resources.stage_index])
        self.records_all = resources.records_all(program)
        self.evicted = resources.evicted(program, in_stream=stepping is not None)
        self.steps = program.steps[resources.stage_index]
        self.under_way: dict[Message, Transfer] = {}
        self.actions: dict[Message, Action] = {}
        self.received: dict[Message, list[Tensor]] = {}
        self.followed: dict[Message, list[_Departed]] = {}
        self.guests: dict[Unit, _Guest] = {}
        self.ahead: dict[Action, list[Tensor]] = {}  # gradients of backwards that were computed with a forward

    @cached_property
    def slots_needed(self) -> int:
        """Return how many slots this stage's pool needs: one is held until its return is known to be complete."""
        held = most = 0
        for step in self.steps:
            held -= sum(message.link.kind == "load" for message in (*step.complete, *step.follows))
            held += step.action.kind == ACCEPT
            most = max(most, held)
        return most

    def take(self, step: Step) -> None:
        """Post receives, wait, compute or start a transfer, post what comes before the send, send."""
        action = step.action
        self.post(step.post)
        for message in step.complete:
            self.complete(message)
        if step.transfer is not None:
            self.start(step.transfer, step)
            self.post(step.then_post)
            return
        inputs = None if step.takes is None else self.received.pop(step.takes)
        if self.swaps is not None and action.kind == FORWARD:
            self.swaps.make_room()
        self.resources.observer.started(action)
        with self.resources.computed.running() if self.resources.measure else nullcontext():
            results = self.compute(action, inputs) if step.fused is None else self.fused(action, inputs, step.fused)
        self.resources.observer.ended(action)
        self.post(step.then_post)
        if step.send is not None:
            self.send_results(step.send, action.unit, results)

    def post(self, items: Iterable[Message | Gathering]) -> None:
        """Post receives from neighbours; start exchanges between all stages."""
        for item in items:
            if isinstance(item, Gathering):
                self.stepping_for(item.batch).gather()
                continue
            unit = Unit(item.micro_batch, item.chunk)
            if item.link in self.layouts:
                description = self.layouts[item.link].receive()
                self.received[item] = cast(VaryingStage, self.stage).buffers_like(unit, description)
            else:
                kind: Kind = FORWARD if item.link.kind == "forward" else BACKWARD
                self.received[item] = self.stage.receive_buffers(kind, unit)
            self.receive(item, self.received[item])

    def compute(self, action: Action, inputs: list[Tensor] | None) -> list[Tensor]:
        """Compute `action` from inputs or gradients; return its outputs or gradients, if it has any."""
        if action in self.ahead:
            return self.ahead.pop(action)
        if self.stepping is not None and action.kind in (FORWARD, BACKWARD):
            self.stepping.use(action.unit)
        if action.kind == FORWARD:
            return self.forward(action.unit, inputs)
        if action.kind == BACKWARD:
            return self.stage.backward(action.unit, inputs)
        if action.kind == INPUT_GRADIENT:
            return cast(SplitStage, self.stage).backward_input(action.unit, inputs)
        if action.kind == WEIGHT_GRADIENT:
            cast(SplitStage, self.stage).backward_weight(action.unit)
        else:  # an update, whose number is its batch
            self.stepping_for(action.micro_batch).update()
        return []

    def fused(self, action: Action, inputs: list[Tensor] | None, backward: FusedBackward) -> list[Tensor]:
        """Compute a forward together with `backward`, which follows it; return the forward's outputs."""
        stage = cast(FusingStage, self.stage)
        gradients = None if backward.takes is None else self.received.pop(backward.takes)

        def forward(unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
            outputs, self.ahead[backward.action] = stage.forward_and_backward(
                unit, inputs, backward.action.unit, gradients
            )
            return outputs

        return self.forward(action.unit, inputs, forward)

    def forward(self, unit: Unit, inputs: list[Tensor] | None, compute: _Forward | None = None) -> list[Tensor]:
        """Forward `unit`, by `compute` or the stage's own `forward`; record what it saves if the run uses that."""
        store, compute = self.resources.store, compute or self.stage.forward
        if not (self.records_all or self.evicted(unit)):
            return compute(unit, inputs)
        with store.recording(unit):
            outputs = compute(unit, inputs)
            for tensor in inputs or ():
                store.attach(unit, tensor)
        if self.resources.measure:
            self.resources.counter.note_saved(store.nbytes(unit))
        if self.swaps is not None:
            self.swaps.seal(unit)
            return outputs
        if self.limit is not None:
            self.limit.leaving(unit, store.nbytes(unit), free_to_move=None)
        if self.evicted(unit):
            store.seal(unit, like=unit.chunk)
        return outputs

    def stepping_for(self, batch: int) -> Stepping:
        """Return what steps the stream's optimizer. Raises RuntimeError outside of a stream."""
        if self.stepping is None:
            raise RuntimeError(f"nobody steps batch {batch}: schedules with updates are carried out stretch by stretch")
        return self.stepping

    def send_results(self, message: Message, unit: Unit, results: list[Tensor]) -> None:
        """Send the `results` of `unit`, or keep them for the next part of the model, where that is on this stage."""
        if not message.is_local:
            if self.resources.measure:
                self.resources.counter.note_sent(sum(result.nbytes for result in results))
            if message.link in self.layouts:
                self.layouts[message.link].send(cast(VaryingStage, self.stage).description(unit, results))
            self.send(message, results)
        elif message.link.kind == "forward":  # leaves, like inputs that were received: the next part's graph begins
            self.received[message] = [result.detach().requires_grad_(result.requires_grad) for result in results]
        else:
            self.received[message] = results

    def start(self, message: Message, step: Step) -> None:
        """Start the transfer of `step`, in the memory that those it follows leave."""
        action = step.action
        self.followed[message] = [self.departed(follows) for follows in step.follows]
        self.actions[message] = action
        if action.kind == EVICT:
            self.evict(message, action.unit)
        elif action.kind == LOAD:
            self.load(message, action.unit)
        elif action.kind == ACCEPT:
            self.accept(message, action.unit)
        elif action.kind == RETURN:
            self.send(message, self.guests[action.unit].tensors)
        else:  # a swap goes beside compute, which waits for it where it needs it: no message is under way
            self.under_way[message] = Transfer((), ())
            for swaps in (self.keeper, self.swaps):
                if swaps is not None:
                    (swaps.swap_out if action.kind == SWAP_OUT else swaps.swap_in)(action.unit)
        self.resources.observer.started(action)

    def evict(self, message: Message, unit: Unit) -> None:
        tensors = self.resources.store.ship(unit)
        self.layouts[message.link].send([tensor.numel() for tensor in tensors])
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
        if self.swaps is not None:  # in the time that the load takes
            self.swaps.swap_in(unit)

    def accept(self, message: Message, unit: Unit) -> None:
        sizes = self.layouts[message.link].receive()
        self.resources.pool.reserve(self.slots_needed, aligned_bytes(sizes))
        slot = self.resources.pool.acquire(aligned_bytes(sizes))
        self.guests[unit] = _Guest(slot, slot.parts(sizes))
        self.receive(message, self.guests[unit].tensors)

    def receive(self, message: Message, buffers: list[Tensor]) -> None:
        after = [one.transfer for one in self.followed.get(message, ())]
        self.under_way[message] = self.channels[message.link].receive(buffers, after)

    def send(self, message: Message, tensors: list[Tensor]) -> None:
        self.under_way[message] = self.channels[message.link].send(tensors)

    def departed(self, message: Message) -> _Departed:
        """Let go of what leaves this stage with `message`, which may still be under way."""
        action = self.actions.pop(message)
        return _Departed(self.under_way.pop(message), action, self.let_go(action))

    def let_go(self, action: Action) -> list[UntypedStorage]:
        """Let go of what a transfer has moved from this stage; return the storages that an eviction leaves."""
        if action.kind == EVICT:
            return self.resources.store.release(action.unit)
        if action.kind == RETURN:
            self.resources.pool.release(self.guests.pop(action.unit).slot)
        return []

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
        if self.swaps is not None and action.kind in (LOAD, SWAP_IN):
            self.swaps.ready(action.unit)
        self.let_go(action)
        self.resources.observer.ended(action)

    def wait_for_neighbour(self, message: Message, transfer: Transfer) -> None:
        """Wait for a message from or to a neighbour; report how long, if `waited` is set."""
        waited = self.resources.waited
        if waited is None:
            transfer.wait()
            return
        watch = Stopwatch(self.resources.clock)
        watch.wait(transfer)
        waited(message, message in self.received, watch.total_ms())

    def wait(self, transfer: Transfer) -> None:
        """Wait for a transfer between partners; add the time to `exposed` in a measured batch."""
        if self.resources.measure:
            self.resources.exposed.wait(transfer)
        else:
            transfer.wait()

    def break_off(self, owed: Iterable[Step]) -> None:
        """Take part in the transfers that partners have started, wait for all that is under way, and let go of it."""
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
