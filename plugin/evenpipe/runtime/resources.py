"""What a stage keeps from batch to batch, and whom it tells what it does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evenpipe.runtime.clock import Clock, clock_for
from evenpipe.runtime.connections import Connections
from evenpipe.runtime.counters import MemoryCounter
from evenpipe.runtime.layout import Layouts
from evenpipe.runtime.pool import SlotPool
from evenpipe.runtime.stopwatch import Stopwatch
from evenpipe.runtime.store import ActivationStore
from evenpipe.schedule import Action, Message

if TYPE_CHECKING:
    from evenpipe.runtime.keep import Keeper

__all__ = ["Observer", "Resources", "Waited"]

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
        """What people should know of; said on standard error."""
        print(f"evenpipe: {line}", file=sys.stderr, flush=True)

    def batch_ended(self) -> None:
        """All of the batch's actions are done; in a stream, some of the next one's too. Not said of one that failed."""


class Resources:
    """What one stage of a pipeline keeps from batch to batch.

    The connections, the acceptor's pool, the layouts of what varies and the memory counter. `parameters` are
    left out of what is saved and counted. Without `measure`, own activations are recorded (some 2 µs a saved tensor) on
    evicting stages only, and the counter knows of nothing else. `keeper`: of a stage that recomputes or swaps what its
    plan chose; it records too. `exposed` has how long compute waited for evictions and loads, on either side, in the
    last batch that was measured, and `computed` how long it lasted. With `waited` every wait for a neighbour is timed,
    for which the host waits too.
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
        self.clock = clock_for(device)
        self.exposed = Stopwatch(self.clock)
        self.computed = Stopwatch(self.clock)
