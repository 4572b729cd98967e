"""kFkB's forward-backward function for megatron-core, with k and b chosen while training."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from evenpipe.megatron.adaptive.given import Given
from evenpipe.megatron.adaptive.preparation import Preparation
from evenpipe.megatron.adaptive.rehearsal import Rehearsal
from evenpipe.megatron.schedule import Call, PipelineSchedule
from evenpipe.runtime.executor import Executor, Observer
from evenpipe.tuner.conditions import Conditions
from evenpipe.tuner.tuner import Retune, Tuner

__all__ = ["AdaptiveSchedule", "Tuning"]


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
        self._size = 0
        self._conditions: Conditions | None = None
        self._state: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any] | None:
        """What a run needs to go on as this one would, as JSON has it, the same on all ranks; None before a batch."""
        if self.tuner is None or self._conditions is None:
            return None
        return self._conditions.state_dict(self.tuner)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first batch. Where the state is of other batches, memory or limits, candidates are found anew."""
        self._state = state

    @property
    def predicted_saved_bytes(self) -> tuple[int, ...]:
        """Per stage, the most that the candidates save that have been decided for."""
        assert self.tuner is not None, "nothing has been tuned yet"
        assert self._conditions is not None
        return self._conditions.predicted_saved_bytes(self.tuner.used)

    def _train(self, **arguments: Any) -> list[Any]:
        given = Given(arguments)
        call = self._call(**arguments)
        executor = self._executor(call.pipeline, list(call.batch.model))
        if self.tuner is None or (self.tuner.due(self.iteration) and self._sizes_of((), given) != self._sizes):
            given = self._prepare(given, call, executor)
        assert self.tuner is not None
        assert self._conditions is not None
        if given.samples != self._conditions.samples:
            raise ValueError(
                f"a batch of {given.samples} samples after one of {self._conditions.samples}: group sizes that are "
                "tuned need batches of one size; leave batch-size ramp-up out, or name a group size"
            )
        if self.tuner.due(self.iteration):
            self._retune(self.tuner, self._conditions, call, executor)
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

    def _sizes_of(self, loaded: Sequence[Any], given: Given) -> tuple[int, ...]:
        sizes = self._tuning.sizes(loaded, given.size)
        if sizes is None:
            sizes = [size for size in range(1, given.samples + 1) if given.samples % size == 0]
        return tuple(sizes)

    def _prepare(self, given: Given, call: Call, executor: Executor) -> Given:
        """Rehearse, and make the tuner; the arguments, with what was read for it read again."""
        loaded = [] if given.source is None else list(itertools.islice(given.source, given.micro_batches))
        self._sizes = self._sizes_of(loaded, given)
        limit_bytes, around_batch = self._tuning.limit_bytes, self._tuning.around_batch
        rehearsal = Rehearsal(executor, self._weights(list(call.batch.model)), self._release)
        preparation = Preparation(rehearsal, given, loaded, self._call, around_batch)
        with rehearsal.without_a_trace(call):
            memory = preparation.memory(self._sizes, self._tuning.static_bytes(), limit_bytes)
            self._conditions = Conditions(given.samples, self.bpipe, limit_bytes, memory)
            state, self._state = self._state, None
            self.tuner = None
            if state is not None:
                self.tuner = self._conditions.resumed(state, self._sizes, self._tuning.interval, self.iteration)
                self._tuning.resumed(self.tuner is not None)
            if self.tuner is None:
                chosen = self._conditions.fitting(self._sizes)
                times = preparation.times({candidate.b for candidate in chosen})
                self.tuner = Tuner(chosen, len(memory), self.bpipe, times, self._tuning.interval)
        if executor.device.type == "cuda":
            # Blocks of sizes that will not be asked for again.
            torch.cuda.empty_cache()
        return given if given.source is None else given.reading(itertools.chain(loaded, given.source))

    def _retune(self, tuner: Tuner, conditions: Conditions, call: Call, executor: Executor) -> None:
        start = time.monotonic()
        decided = conditions.retune(tuner, executor.connections, call.pipeline.rank(), self.iteration, executor.device)
        self._tuning.retuned(decided, time.monotonic() - start)
