"""Devices that take a program from their hosts' queues: what an environment costs, and whether it hangs there.

Host. A stage's host enqueues calls in order: its end of a message, a wait of the compute stream for a message, compute,
its part in what all stages exchange of a batch; an update has the host wait for that. Device. There is one compute
stream, and one for each communicator, which is a link's, or that of all links between two stages. An end starts when
what the compute stream was given before it and the message before it on its communicator are complete; a message takes
its wire's time from when both its ends have started, and is then complete at both. With one queue, a call starts only
when the call before it has been taken by its stream. A synchronisation has the host wait until all is complete that it
has enqueued.

Everything awaits all of a fixed set of things: this is a graph, which hangs if and only if it has a circle, and in
which times are longest paths. Host time, SMs that spinning receives take, and proxies of NCCL are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from evenpipe.schedule import (
    COMPUTE,
    KINDS,
    SENDING,
    Action,
    Gathering,
    Link,
    Message,
    Program,
    Queues,
    Step,
    strictest,
)
from evenpipe.simulate.costs import Costs, SimulationError

__all__ = ["PLAIN", "SYNCHRONISED", "Call", "Device", "Environment", "calls_of", "run_on_devices"]

#: Before which calls the host synchronises, and how that is said.
Synchronised = Literal["never", "compute", "timers", "everything"]
SYNCHRONISED: Final[Mapping[Synchronised, str]] = MappingProxyType(
    {
        "never": "nowhere",
        "compute": "within every forward and backward",
        "timers": "before and after every forward and backward, as Megatron's --timing-log-level 2 does",
        "everything": "at every call, as CUDA_LAUNCH_BLOCKING=1 does",
    }
)
What = Message | Action | Gathering


class Call(NamedTuple):
    """A call that a host enqueues: an end of a message or of a gathering, a wait, compute, an update's wait.

    ``follows``: messages that the stream of an end waits for before it.
    """

    kind: Literal["send", "receive", "wait", "compute", "gather", "update"]
    what: What
    follows: tuple[Message, ...] = ()


class Environment(NamedTuple):
    """The properties of devices. ``one_queue``: all calls of a stage pass one (CUDA_DEVICE_MAX_CONNECTIONS=1).

    ``shared``: all that two stages send each other passes one communicator, both ways, one message after the other.
    """

    one_queue: bool = False
    synchronised: Synchronised = "never"
    shared: bool = False

    @property
    def queues(self) -> Queues:
        """Return the kind of queues that a program's order goes by here."""
        holds: dict[Queues, bool] = {"one": self.one_queue, "synchronised": self.synchronised != "never"}
        return strictest(kind for kind in holds if holds[kind])

    def stream(self, link: Link) -> object:
        """Return the name of the stream of a link's ends, on both of its stages."""
        return frozenset((link.source, link.target)) if self.shared else link

    def synchronises(self, calls: Sequence[Call], at: int) -> bool:
        """Return whether the host waits, just before the call of that number, for all that it has enqueued."""
        kinds = {
            "never": (),
            "compute": (calls[at],),
            "timers": (calls[at], *calls[at - 1 : at]),
            "everything": None,
        }[self.synchronised]
        return kinds is None or any(call.kind == "compute" for call in kinds)


#: Many queues, and nothing synchronised.
PLAIN: Final = Environment()


def calls_of(program: Program, stage: int) -> list[Call]:
    """Return the calls of a stage's host in one batch, or stream of batches; swaps with that host are left out."""
    calls = [call for step in program.steps[stage] for call in _calls(step)]
    return [*calls, *_waits(program.drain[stage])]


def _calls(step: Step) -> Iterator[Call]:
    action = step.action
    yield from _posts(step.post)
    yield from _waits(step.complete)
    if step.transfer is not None and not step.transfer.is_local:
        yield Call("send" if action.kind in SENDING else "receive", step.transfer, step.follows)
    elif KINDS[action.kind].of_batch:
        yield Call("update", Gathering(action.micro_batch))
    elif action.kind in COMPUTE:
        yield Call("compute", action)
    yield from _posts(step.then_post)
    if step.send is not None and not step.send.is_local:
        yield Call("send", step.send)


def _waits(messages: Iterable[Message]) -> Iterator[Call]:
    return (Call("wait", message) for message in messages if not message.is_local)


def _posts(items: Iterable[Message | Gathering]) -> Iterator[Call]:
    return (Call("gather" if isinstance(item, Gathering) else "receive", item) for item in items)


def run_on_devices(program: Program, costs: Costs, environment: Environment) -> float:
    """Milliseconds that ``program`` takes. Raises SimulationError where it hangs: it names where each stage stands."""
    stages = range(program.schedule.stages)
    device = Device([calls_of(program, stage) for stage in stages], costs, program.schedule.chunks, environment)
    if device.stuck:
        stood = ", ".join(f"stage {stage} at {call.kind} {_name(call.what)}" for stage, call in device.stuck)
        raise SimulationError(f"the devices wait for one another for ever: {stood}")
    return device.makespan_ms


def _name(what: What) -> str:
    return f"{what.link} {what.micro_batch}" if isinstance(what, Message) else str(what)


class Device:
    """All stages' calls on their devices, as events and what each awaits; see this module.

    ``stuck``: per stage that waits for ever, the first call that is never through. ``makespan_ms``: when all is.
    """

    def __init__(
        self, calls: Sequence[Sequence[Call]], costs: Costs, chunks: int = 1, environment: Environment = PLAIN
    ) -> None:
        self._awaits: list[list[int]] = []
        self._takes_ms: list[float] = []
        # An end of a message or of a gathering is complete with all its other ends, and some time after them.
        complete: dict[What, int] = {}
        for row in calls:
            for kind, what, _ in row:
                if kind in ("send", "receive", "gather") and what not in complete:
                    wire = costs.wire(what.link) if isinstance(what, Message) else None
                    complete[what] = self._event((), 0.0 if wire is None else wire.transmit_ms + wire.latency_ms)
        through = [self._stage(row, complete, costs, stage, chunks, environment) for stage, row in enumerate(calls)]
        ended = self._resolved()
        self.stuck = [
            (stage, next(call for call, event in zip(calls[stage], events, strict=True) if ended[event] is None))
            for stage, events in enumerate(through)
            if any(ended[event] is None for event in events)
        ]
        self.makespan_ms = max((end for end in ended if end is not None), default=0.0)

    def _stage(
        self,
        calls: Sequence[Call],
        complete: Mapping[What, int],
        costs: Costs,
        stage: int,
        chunks: int,
        environment: Environment,
    ) -> list[int]:
        """Enqueue a stage's calls; the events with which each has been taken by its stream."""
        of_chunks = costs.of(stage, chunks)
        last_compute: list[int] = []  # of the compute stream
        last_of: dict[object, int] = {}  # what is complete last on each other stream
        enqueued: list[int] = []
        through: list[int] = []
        for at, (kind, what, follows) in enumerate(calls):
            under_way = [*last_compute, *last_of.values()] if environment.synchronises(calls, at) else []
            if kind == "update" and what in complete:  # in place, a step takes the stage's own gradients alone
                under_way.append(complete[what])
            enqueued = [self._event([*enqueued, *under_way])]
            cost = KINDS[what.kind].cost if isinstance(what, Action) else None
            takes_ms = of_chunks[what.chunk][cost] if isinstance(what, Action) and cost is not None else 0.0
            event = self._event([*enqueued, *last_compute], takes_ms)
            if environment.one_queue:
                self._awaits[event] += through[-1:]
            through.append(event)
            if kind == "wait":
                self._awaits[event].append(complete[what])
            self._awaits[event] += [complete[message] for message in follows]
            if kind in ("wait", "compute"):
                last_compute = [event]
            elif kind != "update":
                stream = environment.stream(what.link) if isinstance(what, Message) else "gather"
                self._awaits[event] += [last_of[stream]] if stream in last_of else []
                self._awaits[complete[what]].append(event)
                last_of[stream] = complete[what]
        return through

    def _event(self, awaits: Iterable[int], takes_ms: float = 0.0) -> int:
        self._awaits.append([*awaits])
        self._takes_ms.append(takes_ms)
        return len(self._awaits) - 1

    def _resolved(self) -> list[float | None]:
        """When each event ends; None for what is never reached."""
        sorter = TopologicalSorter(dict(enumerate(self._awaits)))
        with suppress(CycleError):
            sorter.prepare()
        ended: list[float | None] = [None] * len(self._awaits)
        while ready := sorter.get_ready():
            for event in ready:
                starts_ms = max((ended[awaited] or 0.0 for awaited in self._awaits[event]), default=0.0)
                ended[event] = starts_ms + self._takes_ms[event]
            sorter.done(*ready)
        return ended
