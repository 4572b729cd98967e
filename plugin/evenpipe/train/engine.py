"""What a training run needs of an engine, and what it is told by one: where a process is, and when each action ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist

from evenpipe.runtime.memory import MemoryCounter
from evenpipe.runtime.timing import HostClock, SpanRecorder
from evenpipe.schedule import FORWARD, INPUT_GRADIENT, Action, Kind
from evenpipe.simulate import MemoryPoint, Span
from evenpipe.train.data import Corpus
from evenpipe.train.engines import ENGINES
from evenpipe.train.options import TrainOptions
from evenpipe.tuner.process_memory import KeptBytes
from evenpipe.tuner.tuner import Retune

__all__ = [
    "Case",
    "Coordinates",
    "Engine",
    "EngineModule",
    "FailureContext",
    "OptimizerStep",
    "Recorder",
    "Tuned",
    "changed_versions",
    "engine_module",
]


class FailureContext:
    """Knows where one process of stage `stage` is: `position` names the action, or the phase outside of a schedule."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.position = "start-up"

    def enter(self, phase: str) -> None:
        """The process goes on to `phase`, e.g. "optimizer step"."""
        self.position = phase

    def start_iteration(self, iteration: int) -> None:
        """A batch begins."""
        self.position = "start of the iteration"

    def start_action(self, action: Action) -> None:
        """The process starts `action`."""
        self.position = str(action)


class Recorder:
    """Told when actions start and end (the executor's `Observer`); keeps the spans of the present batch.

    Times are of the host's monotonic clock, which the processes of a machine share: on a GPU they say when work was
    handed to the device, not when the device did it.
    """

    def __init__(self, failure: FailureContext) -> None:
        self._failure = failure
        self._clock = HostClock()
        self._recorder = SpanRecorder(self._clock)
        self._unit_bytes: dict[tuple[Kind, int], int] = {}
        self._counter: Callable[[], MemoryCounter] | None = None
        self._held: list[tuple[float, int, int]] = []

    def watch(self, counter: Callable[[], MemoryCounter]) -> None:
        """From here on, note what `counter()` has whenever an action starts or ends."""
        self._counter = counter

    @property
    def spans(self) -> tuple[Span, ...]:
        """Return the spans that have ended in this batch, in the order of their ends; milliseconds."""
        return tuple(Span(*span) for span in self._recorder.since(0.0))

    @property
    def memory(self) -> tuple[MemoryPoint, ...]:
        """Return what the stage held in this batch, own and accepted, at each change, by the spans' clock."""
        marked = (MemoryPoint(self._clock.elapsed_ms(0.0, at), live, nbytes) for at, live, nbytes in self._held)
        points: list[MemoryPoint] = []
        for point in marked:
            if not points or points[-1][1:] != point[1:]:
                points.append(point)
        return tuple(points)

    @property
    def unit_bytes(self) -> tuple[int, ...]:
        """Per chunk, what one micro-batch saves that no other has saved before it."""
        return tuple(size for (kind, _), size in sorted(self._unit_bytes.items()) if kind == FORWARD)

    @property
    def left_bytes(self) -> tuple[int, ...]:
        """Per chunk, what one micro-batch keeps from the end of its input gradient on; all, where none was computed."""
        return tuple(self._unit_bytes.get((INPUT_GRADIENT, chunk), size) for chunk, size in enumerate(self.unit_bytes))

    def start_batch(self) -> None:
        """Forget the batch before."""
        self._recorder.clear()
        self._unit_bytes.clear()
        self._held.clear()
        self._note_held()

    def started(self, action: Action) -> None:
        """`action` starts."""
        self._failure.start_action(action)
        self._note_held()
        self._recorder.started(action)

    def ended(self, action: Action) -> None:
        """`action` has ended; a transfer, when its completion has been waited for."""
        # Held at the end of its span, not a moment after it: readers match the two by time.
        self._note_held()
        self._recorder.ended(action)

    def saved(self, action: Action, nbytes: int) -> None:
        """The forward `action` has saved `nbytes` for its backward, or the input gradient has left them of that."""
        # The first micro-batch also saves what all share, such as the causal mask.
        key = action.kind, action.chunk
        self._unit_bytes[key] = min(nbytes, self._unit_bytes.get(key, nbytes))

    def _note_held(self) -> None:
        if self._counter is not None:
            counter = self._counter()
            live, nbytes = counter.own_units + counter.accepted_units, counter.own_bytes + counter.accepted_bytes
            self._held.append((self._clock.mark(), live, nbytes))


class Case(NamedTuple):
    """One training run, as one of its processes has it; `note` shows the user a line, on rank 0."""

    options: TrainOptions
    corpus: Corpus
    device: torch.device
    failure: FailureContext
    recorder: Recorder
    note: Callable[[str], None]


class Coordinates(NamedTuple):
    """A process in the run: pipeline stage, tensor-parallel rank, data-parallel replica; the order of digests."""

    stage: int
    shard: int
    replica: int


class OptimizerStep(NamedTuple):
    """The outcome of an iteration's step; `grad_norm`, before clipping, is None where it was skipped."""

    iteration: int
    updated: bool
    grad_norm: float | None


class Tuned(NamedTuple):
    """Decisions on group and micro-batch sizes, and per stage what was predicted for them; the same everywhere."""

    retunes: tuple[Retune, ...] = ()
    predicted_saved_bytes: tuple[int, ...] = ()


class Engine(Protocol):
    """One process' part of a model in training. It tells the case's recorder of every action."""

    #: Which part this is.
    coordinates: Coordinates
    #: The processes with the same part in other data-parallel replicas, and this one.
    replicas: dist.ProcessGroup

    @property
    def counter(self) -> MemoryCounter:
        """Return the counter of what this stage holds, with peaks since the last `reset_peak`."""

    def restore(self, state: dict[str, Any]) -> str | None:
        """Take over what `state` gave on the same rank; what to tell the user where not all of it is kept."""

    def begin(self, iteration: int) -> None:
        """`iteration`, counted from 0, is the first to be trained; called once, after `restore`."""

    def train(self, iteration: int) -> list[float]:
        """Train on the batch of `iteration`; the micro-batches' losses, where the model ends, else nothing.

        Raises OptionsError for an option of which only a run can find that it does not fit.
        """

    @property
    def finished(self) -> OptimizerStep | None:
        """The last step of which everything is known."""

    def drain(self) -> None:
        """Finish what is under way, on all stages alike: the next batch starts a pipeline of its own."""

    @property
    def versions_peak(self) -> int:
        """The most versions of the weights that there have been at once."""

    @property
    def tuned(self) -> Tuned:
        """Return what has been chosen while training."""

    def kept_bytes(self) -> KeptBytes:
        """Return what stays from batch to batch."""

    def weights(self) -> dict[tuple[int, int], str]:
        """Digests of the parameters here (`evenpipe.train.run.digest`), in the order of the keys over all processes.

        The processes of other replicas have the same keys, and must have the same weights.
        """

    def state(self) -> dict[str, Any]:
        """All that this process has which the options do not give, as plain tensors and numbers; nothing is under way.

        What is given may share the memory of what is being trained.
        """


class EngineModule(Protocol):
    """The functions of an engine's module."""

    def prepare(self, device: torch.device) -> None:
        """Called once in a process, before its first run."""

    def opened(self, case: Case) -> AbstractContextManager[Engine]:
        """The engine of one run, ready to train inside; needs torch.distributed initialised. Leaves nothing behind."""


def changed_versions(saved: Mapping[str, Any] | None, kept: bool, correction: str) -> str | None:
    """Return what to tell the user if the checkpoint has two versions of the weights and the run one, or vice versa.

    `saved` is what it has of 2BW or PACI, if anything. Or it has another `correction` of the delay; None where all is
    alike.
    """
    if saved is not None and saved["before"] is None:  # of PACI
        saved = None
    if (saved is not None) == kept:
        before = "none" if saved is None else saved.get("correction", "none")
        if not kept or before == correction:
            return None
        return f"the checkpoint has the delay correction {before}: this run's, {correction}, begins anew"
    if saved is not None:
        return "the checkpoint has two versions of the weights: this run goes on from the newer one"
    return "the checkpoint has one version of the weights: both versions of this run start from it"


def engine_module(name: str) -> EngineModule:
    """Import the engine that --engine calls `name`."""
    return cast(EngineModule, import_module(ENGINES[name].path))
