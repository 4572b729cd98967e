"""The schedule functions that the trainer installs: EvenPipe's, or Megatron's own with an observer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

from evenpipe.megatron.adaptive.schedule import AdaptiveSchedule, Tuning
from evenpipe.megatron.adaptive.static_memory import static_bytes
from evenpipe.megatron.schedule import PipelineSchedule, in_place_of_megatron
from evenpipe.megatron.symbols import TRAINED
from evenpipe.megatron.train_engine.learner import Learner
from evenpipe.megatron.train_engine.stock import StockSchedule, reporting_to
from evenpipe.megatron.two_bw import StreamSchedule, TwoBWOptimizer
from evenpipe.runtime.executor import Observer
from evenpipe.runtime.memory import MemoryCounter
from evenpipe.schedule import FORWARD, INPUT_GRADIENT, UPDATE, Action
from evenpipe.train.engine import Recorder
from evenpipe.tuner.process_memory import limit_bytes
from evenpipe.two_bw.stream import TwoBW
from evenpipe.upstream import verify

__all__ = ["InstalledSchedule", "installed_schedule"]

_GOES_ON: Final = "group and micro-batch sizes are gone on with"
_ANEW: Final = "group and micro-batch sizes are chosen anew, as batches, memory or its limit are others"


@contextmanager
def installed_schedule(
    learner: Learner, stage: int, recorder: Recorder, note: Callable[[str], None] = lambda text: None
) -> Iterator[InstalledSchedule]:
    """The schedule of the learner's options, in force inside; `recorder` is told of every action.

    `note` shows the user a line. One stage is no pipeline: there Megatron's own loop, which is 1F1B, runs always.
    """
    options = learner.options
    if options.engine == "evenpipe" and options.stages > 1:
        verify(TRAINED)
        ours = _EvenPipeSchedule(learner, recorder, note)
        with in_place_of_megatron(ours.schedule).in_force():
            yield ours
        ours.schedule.close()  # not after a failure: the process ends, and its peers may wait at the other ends
    else:
        parameters = [parameter for chunk in learner.replica.chunks for parameter in chunk.parameters()]
        stock = StockSchedule(options.plan.actions[stage], parameters, recorder)
        with reporting_to(stock).in_force():
            yield stock


class _EvenPipeSchedule(Observer):
    """EvenPipe's schedule function; the observer of its executor.

    `extra` is what it keeps between iterations; None where every iteration ends with nothing under way. `adaptive` is
    what chooses group and micro-batch sizes; None where the options do.
    """

    def __init__(self, learner: Learner, recorder: Recorder, note: Callable[[str], None]) -> None:
        options = learner.options
        self.extra: TwoBW | None = None
        self.schedule: PipelineSchedule
        self.adaptive: AdaptiveSchedule | None = None
        self._stream: StreamSchedule | None = None
        self._micro_batches = options.micro_batches
        spec = options.programs.spec
        if options.streams:
            self.schedule = self._stream = StreamSchedule(options.bpipe, observer=self, measure=True, schedule=spec)
            self.extra = self._stream.attach(
                TwoBWOptimizer(learner.replica.chunks, learner.optimizer, options.in_place),
                delay_correction=options.delay_correction,
            )
        elif options.group_size == "auto":
            self.schedule = self.adaptive = AdaptiveSchedule(
                _tuning(learner, note), options.bpipe, observer=self, measure=True, schedule=spec
            )
        else:
            self.schedule = PipelineSchedule(
                spec, options.bpipe, observer=self, measure=True, group_size=options.plan.group_size
            )
        self._recorder = recorder
        self._before = MemoryCounter()

    @property
    def counter(self) -> MemoryCounter:
        """Return the counter of what this stage holds, with peaks since the last `reset_peak`."""
        # The executor is made in the first batch.
        return self._before if self.schedule.executor is None else self.schedule.executor.counter

    def start_batch(self) -> None:
        """A batch begins, which the executor tells by itself."""

    def started(self, action: Action) -> None:
        self._recorder.started(self._along_the_run(action))

    def ended(self, action: Action) -> None:
        self._recorder.ended(self._along_the_run(action))
        if action.kind in (FORWARD, INPUT_GRADIENT) and self.schedule.executor is not None:
            self._recorder.saved(action, self.schedule.executor.store.nbytes(action.unit))

    def _along_the_run(self, action: Action) -> Action:
        """A stream counts from where it began, which is where the one before was broken off."""
        if self._stream is None:
            return action
        batches = self._stream.first_batch
        first = batches if action.kind == UPDATE else batches * self._micro_batches
        return action._replace(micro_batch=first + action.micro_batch)


InstalledSchedule: TypeAlias = _EvenPipeSchedule | StockSchedule
"""One stage's side of the schedule, installed where `get_forward_backward_func` finds it."""


def _tuning(learner: Learner, note: Callable[[str], None]) -> Tuning:
    options, chunks, optimizer = learner.options, learner.replica.chunks, learner.optimizer
    # Micro-batches of BERT count different numbers of tokens, and routers balance those of each micro-batch: cut anew,
    # they would make another loss. Those that have lengths of their own cannot be joined.
    cut = options.model == "gpt" and not options.experts and not options.min_length
    return Tuning(
        limit_bytes=limit_bytes(options.memory_gib, learner.device),
        static_bytes=lambda: static_bytes(chunks, optimizer),
        interval=options.retune_interval,
        sizes=lambda _, size: None if cut else [size],
        log=note,
        resumed=lambda goes_on: note(f"--load {options.load}: {_GOES_ON if goes_on else _ANEW}"),
    )
