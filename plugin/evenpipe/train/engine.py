"""What a training run needs of an engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from evenpipe.train.engines import ENGINES

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from evenpipe.runtime.memory import MemoryCounter
    from evenpipe.train.data import Corpus
    from evenpipe.train.options import TrainOptions
    from evenpipe.train.recorder import FailureContext, Recorder
    from evenpipe.tuner.process_memory import KeptBytes
    from evenpipe.tuner.tuner import Retune

__all__ = ["Case", "Coordinates", "Engine", "EngineModule", "OptimizerStep", "Tuned", "engine_module"]


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
    """What became of an iteration's step; `grad_norm`, before clipping, is None where it was skipped."""

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
        """What this stage holds, with peaks since the last `reset_peak`."""

    def restore(self, state: dict[str, Any]) -> str | None:
        """Take over what `state` gave on the same rank; what to tell the user where not all of it is kept."""

    def begin(self, iteration: int) -> None:
        """`iteration`, counted from 0, is the first to be trained; called once, after `restore`."""

    def start_batch(self) -> None:
        """A batch begins."""

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
        """What has been chosen while training."""

    def kept_bytes(self) -> KeptBytes:
        """What stays from batch to batch."""

    def weights(self) -> dict[tuple[int, int], str]:
        """Digests of the parameters here (`evenpipe.train.gather.digest`), in the order of the keys over all processes.

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


def engine_module(name: str) -> EngineModule:
    """Import the engine that --engine calls `name`."""
    return cast(EngineModule, import_module(ENGINES[name].path))
