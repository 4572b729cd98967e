"""kFkB's forward-backward function for megatron-core, with k and b chosen while training."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import torch

from evenpipe.megatron.adaptive.given import Given
from evenpipe.megatron.adaptive.preparation import Preparation
from evenpipe.megatron.adaptive.rehearsal import Rehearsal
from evenpipe.megatron.schedule import Call, PipelineSchedule
from evenpipe.planner import StageMemory, candidates, saved_peaks
from evenpipe.runtime.executor import Executor, Observer
from evenpipe.tuner.collective import retune
from evenpipe.tuner.tuner import Retune, Tuner, worth_telling_apart

__all__ = ["AdaptiveSchedule", "Tuning"]

_FORMAT: Final = "evenpipe.tuner/1"
#: Memory that differs by less is the same.
_SAME: Final = 0.01


class Tuning(NamedTuple):
    """What is tuned, and within what.

    `limit_bytes` is the memory of every process, and `static_bytes` what this one needs besides activations, asked
    once. `interval`: iterations between decisions; None: so many as take an hour. `sizes` is given the loader's
    micro-batches of the first batch (none where this process loads nothing) and their size, and returns the sizes that
    micro-batches may have, None for all; the same on all ranks. `around_batch` is entered with the size while a batch
    is carried out. On all ranks, `retuned` is told of every decision, and of the seconds that it took, and `resumed`
    whether a state that was loaded is gone on with.
    """

    limit_bytes: int
    static_bytes: Callable[[], int]
    interval: int | None = None
    sizes: Callable[[Sequence[Any], int], Sequence[int] | None] = lambda loaded, size: None
    around_batch: Callable[[int], AbstractContextManager[Any]] = nullcontext
    retuned: Callable[[Retune, float], None] = lambda retune, seconds: None
    resumed: Callable[[bool], None] = lambda goes_on: None


class AdaptiveSchedule(PipelineSchedule):
    """A `PipelineSchedule` of kFkB that cuts each batch into micro-batches of the chosen size.

    The batch has the same samples in the same order under every candidate. Before the first batch every stage rehearses
    alone what its micro-batches take and save; candidates that do not fit are left out, and never run. Between two
    batches, where nothing is under way, all ranks measure their links and rank 0 decides.

    A call raises PlanError, before anything is carried out, where no candidate fits. `iteration` is the number of the
    next batch, from 0; who loads a checkpoint sets it.
    """

    def __init__(
        self,
        tuning: Tuning,
        bpipe: bool = False,
        observer: Observer | None = None,
        measure: bool = False,
        connected: Callable[[PipelineSchedule], None] = lambda schedule: None,
    ) -> None:
        super().__init__("kfkb", bpipe, observer, measure, connected)
        self.tuner: Tuner | None = None
        self._tuning = tuning
        self.iteration = 0
        self._sizes: tuple[int, ...] = ()
        self._samples = 0
        self._size = 0
        self._memory: tuple[StageMemory, ...] = ()
        self._state: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any] | None:
        """What a run needs to go on as this one would, as JSON has it, the same on all ranks; None before a batch."""
        if self.tuner is None:
            return None
        return {
            **self._conditions,
            "memory": [list(stage) for stage in self._memory],
            "tuner": self.tuner.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first batch. Where the state is of other batches, memory or limits, candidates are found anew."""
        self._state = state

    @property
    def predicted_saved_bytes(self) -> tuple[int, ...]:
        """Per stage, the most that the candidates save that have been decided for."""
        assert self.tuner is not None, "nothing has been tuned yet"
        peaks = [saved_peaks(self._memory, candidate, self.bpipe) for candidate in self.tuner.used]
        return tuple(map(max, zip(*peaks, strict=True)))

    def _train(self, **arguments: Any) -> list[Any]:
        given = Given(arguments)
        call = self._call(**arguments)
        executor = self._executor(call.pipeline, list(call.batch.model))
        if self.tuner is None or (self.tuner.due(self.iteration) and self._sizes_of((), given) != self._sizes):
            given = self._prepare(given, call, executor)
        assert self.tuner is not None
        if given.samples != self._samples:
            raise ValueError(
                f"a batch of {given.samples} samples after one of {self._samples}: group sizes that are tuned need "
                "batches of one size; leave batch-size ramp-up out, or name a group size"
            )
        if self.tuner.due(self.iteration):
            self._retune(self.tuner, call, executor)
        chosen = self.tuner.current
        assert chosen is not None
        if self._size != chosen.b:
            self._size = chosen.b
            executor.forget_sizes()
        self.group_size = chosen.k
        self.iteration += 1
        with self._tuning.around_batch(chosen.b):
            return super()._train(**given.in_micro_batches_of(chosen.b))

    @property
    def _in_groups(self) -> bool:
        return True

    @property
    def _conditions(self) -> dict[str, Any]:
        """Under which a state is of use, besides equal memory."""
        return {
            "format": _FORMAT,
            "samples": self._samples,
            "bpipe": self.bpipe,
            "limit_bytes": self._tuning.limit_bytes,
        }

    def _sizes_of(self, loaded: Sequence[Any], given: Given) -> tuple[int, ...]:
        sizes = self._tuning.sizes(loaded, given.size)
        if sizes is None:
            sizes = [size for size in range(1, given.samples + 1) if given.samples % size == 0]
        return tuple(sizes)

    def _prepare(self, given: Given, call: Call, executor: Executor) -> Given:
        """Rehearse, and make the tuner; the arguments, with what was read for it read again."""
        loaded = [] if given.source is None else list(itertools.islice(given.source, given.micro_batches))
        self._samples, self._sizes = given.samples, self._sizes_of(loaded, given)
        limit_bytes, around_batch = self._tuning.limit_bytes, self._tuning.around_batch
        rehearsal = Rehearsal(executor, self._weights(list(call.batch.model)), self._release)
        preparation = Preparation(rehearsal, given, loaded, self._call, around_batch)
        with rehearsal.without_a_trace(call):
            self._memory = preparation.memory(self._sizes, self._tuning.static_bytes(), limit_bytes)
            state, self._state = self._state, None
            self.tuner = None if state is None else self._resumed(state)
            if state is not None:
                self._tuning.resumed(self.tuner is not None)
            if self.tuner is None:
                fitting = candidates(self._memory, given.samples, limit_bytes, self.bpipe, self._sizes)
                chosen = worth_telling_apart(fitting)
                times = preparation.times({candidate.b for candidate in chosen})
                self.tuner = Tuner(chosen, len(self._memory), self.bpipe, times, self._tuning.interval)
        if executor.device.type == "cuda":
            # Blocks of sizes that will not be asked for again.
            torch.cuda.empty_cache()
        return given if given.source is None else given.reading(itertools.chain(loaded, given.source))

    def _resumed(self, state: Mapping[str, Any]) -> Tuner | None:
        """The tuner that gave `state`, if this run is of the same batches, limit and memory."""
        memory = [StageMemory(*stage) for stage in state.get("memory", ())]
        if not self._conditions.items() <= state.items() or not _alike(memory, self._memory):
            return None
        tuner = Tuner((), len(memory), self.bpipe, {}, self._tuning.interval)
        tuner.load_state_dict(state["tuner"], self.iteration)
        return tuner if {candidate.b for candidate in tuner.candidates} <= set(self._sizes) else None

    def _retune(self, tuner: Tuner, call: Call, executor: Executor) -> None:
        start = time.monotonic()
        message = max(stage.message_bytes for stage in self._memory)
        sizes = {candidate.b: candidate.b * message for candidate in tuner.candidates}
        stage, stages = call.pipeline.rank(), call.pipeline.size()
        decided = retune(tuner, executor.connections, stage, stages, sizes, self.iteration, executor.device)
        self._tuning.retuned(decided, time.monotonic() - start)


def _alike(saved: Sequence[StageMemory], now: Sequence[StageMemory]) -> bool:
    """Whether runs hold the same, but for what libraries of other versions may keep."""
    return len(saved) == len(now) and all(
        math.isclose(before, after, rel_tol=_SAME)
        for one, other in zip(saved, now, strict=True)
        for before, after in zip(one, other, strict=True)
    )
