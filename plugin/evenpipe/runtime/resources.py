"""What a stage keeps from batch to batch, whom it tells what it does, and what a batch has cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from evenpipe.runtime.channel import Layouts
from evenpipe.runtime.connections import Connections
from evenpipe.runtime.memory import MemoryCounter, SlotPool
from evenpipe.runtime.recompute_swap import Keeper
from evenpipe.runtime.store import ActivationStore
from evenpipe.runtime.timing import Clock, Stopwatch, clock_for
from evenpipe.schedule import EVICT, SWAP_OUT, WEIGHT_GRADIENT, Action, Message, Program, Unit

if TYPE_CHECKING:
    from evenpipe.runtime.host_swaps import HostLimit, HostSwaps

__all__ = ["Observer", "Resources", "StageFigures", "Waited", "highest_of_all", "per_stage"]

#: Is told of a wait for a neighbour's message: whether this stage receives it, and how many milliseconds that took.
Waited = Callable[[Message, bool, float], None]


class Observer:
    """Is told what a stage does, and takes no notice: to be overridden."""

    def batch_started(self, clock: Clock) -> None:
        """Nothing of the batch is under way yet. `clock` times this stage's compute."""

    def started(self, action: Action) -> None:
        """Compute starts, or a transfer is under way."""

    def ended(self, action: Action) -> None:
        """Compute has ended, or a transfer has been waited for."""

    def remark(self, line: str) -> None:
        """Print a line that people should know of, on standard error."""
        print(f"evenpipe: {line}", file=sys.stderr, flush=True)

    def batch_ended(self) -> None:
        """All of the batch's actions are done; in a stream, some of the next one's too. Not said of one that failed."""


class Resources:
    """The state that one stage of a pipeline keeps from batch to batch.

    It has the connections, the acceptor's pool, the layouts of what varies and the memory counter. `parameters` are
    left out of what is saved and counted. Without `measure`, only micro-batches that are evicted are recorded (some
    2 µs a saved tensor), and all of a stage that keeps to a limit; the counter knows of nothing else. `keeper`: of a
    stage that recomputes or swaps what its plan chose; it records too. `swaps`: of one that swaps a share, as `swap`
    has it. `exposed` has how long compute waited for evictions and loads, on either side, in the last measured batch;
    `computed` has how long compute lasted in it. With `waited` every wait for a neighbour is timed, for which the host
    waits too.
    """

    def __init__(
        self,
        stage_index: int,
        connections: Connections,
        device: torch.device,
        parameters: Iterable[Tensor] = (),
        observer: Observer | None = None,
        measure: bool = True,
        waited: Waited | None = None,
    ) -> None:
        self.stage_index = stage_index
        self.device = device
        self.connections = connections
        self.counter = MemoryCounter()
        self.store = ActivationStore(parameters, self.counter, device)
        self.pool = SlotPool(device, self.counter)
        self.layouts = {link: Layouts(channel) for link, channel in connections.layouts.items()}
        self.observer = observer if observer is not None else Observer()
        self.measure = measure
        self.waited = waited
        self.keeper: Keeper | None = None
        self.swaps: HostSwaps | None = None
        self.clock = clock_for(device)
        self.exposed = Stopwatch(self.clock)
        self.computed = Stopwatch(self.clock)

    @contextmanager
    def measuring(self, also: bool) -> Iterator[None]:
        """Measure the batches that are carried out inside, if `also` says so or they would be anyway."""
        before, self.measure = self.measure, self.measure or also
        try:
            yield
        finally:
            self.measure = before

    def swap(self, share: float | HostLimit | None) -> None:
        """Have this stage swap at most a `share` of what each micro-batch saves, or what keeps it to a limit.

        None: nothing. All stages call it.
        """
        if share is not None:
            from evenpipe.runtime.host_swaps import HostSwaps  # which nothing else in a script's run needs

            self.swaps = HostSwaps(self.store, self.device, share)
            self.connections.compare(self.swaps.link.named)

    def recording(self, program: Program) -> Callable[[Unit], AbstractContextManager[object]] | None:
        """Return what this stage enters to save what the second half of a backward needs.

        None where `program` has whole backwards; it counts nothing where forwards are not recorded.
        """
        if all(action.kind != WEIGHT_GRADIENT for action in program.schedule.actions[self.stage_index]):
            return None
        every, evicted = self.records_all(program), self.evicted(program)
        return lambda unit: self.store.recording(unit) if every or evicted(unit) else nullcontext()

    def evicted(self, program: Program, in_stream: bool = False) -> Callable[[Unit], bool]:
        """Return what says of a unit whether this stage evicts it; in a stream, any, if `program` evicts some."""
        units = {action.unit for action in program.schedule.actions[self.stage_index] if action.kind == EVICT}
        return (lambda unit: True) if in_stream and units else units.__contains__

    def records_all(self, program: Program) -> bool:
        """Return whether all forwards are recorded: what they save is measured, swapped or computed again."""
        moves = self.keeper is not None or self.swaps_in(program) is not None
        return self.measure or moves or self.limit is not None

    @property
    def limit(self) -> HostLimit | None:
        """Return the limit that this stage keeps to, and watches where it swaps nothing."""
        return None if self.swaps is None else self.swaps.limit

    def swaps_in(self, program: Program) -> HostSwaps | None:
        """Return what swaps a share of what this stage saves, if it swaps any micro-batch under `program`."""
        if self.swaps is None:
            return None
        swaps_any = any(action.kind == SWAP_OUT for action in program.schedule.actions[self.stage_index])
        return self.swaps if swaps_any else None


class StageFigures(NamedTuple):
    """One stage, or one of its processes.

    `peak_live`: micro-batches (times model chunks), own plus accepted; `peak_bytes`: what these save; `evicted_bytes`:
    given to the partner, all since the last `reset_peak`. `exposed_ms`: how long compute waited for evictions and
    loads, on either side, and `computed_ms`: how long it lasted, in the last measured batch.
    """

    peak_live: int
    peak_bytes: int
    evicted_bytes: int
    exposed_ms: float
    computed_ms: float = 0.0

    @classmethod
    def of(cls, resources: Resources) -> StageFigures:
        """Return the figures of this process, after a batch that was measured."""
        held, times = resources.counter, (resources.exposed.total_ms(), resources.computed.total_ms())
        return cls(held.peak_units, held.peak_bytes, held.evicted_bytes, *times)

    @classmethod
    def of_row(cls, row: Sequence[float]) -> StageFigures:
        """Return the figures from numbers as they were exchanged."""
        live, peak, evicted, *times = row
        return cls(int(live), int(peak), int(evicted), *times)


def per_stage(
    mine: StageFigures, stage: int, stages: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> tuple[StageFigures, ...]:
    """Return the largest of each figure, per stage; all ranks of `group` call it."""
    table = [mine if at == stage else [0.0] * len(mine) for at in range(stages)]
    return tuple(map(StageFigures.of_row, highest_of_all(table, device, group)))


def highest_of_all(table: Sequence[Any], device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """Return a table of any shape with the highest value that a rank of `group` has of each number.

    Numbers travel as doubles, which are exact for all bytes that a machine can hold.
    """
    numbers = torch.tensor(table, dtype=torch.float64, device=device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    return numbers.tolist()
