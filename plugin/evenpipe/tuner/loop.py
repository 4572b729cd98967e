"""Ada-Grouper's online half from batch to batch: sizes are measured, then a candidate is chosen, and chosen again."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch

from evenpipe.planner.grouped import Candidate, GroupedSchedule
from evenpipe.planner.memory import Measured, stage_memory, unit_bytes
from evenpipe.runtime.executor import Executor
from evenpipe.tuner.collective import of_all_stages, retune
from evenpipe.tuner.exploration import Conditions, Explored, explore
from evenpipe.tuner.tuner import Retune, Tuner

__all__ = ["AdaptiveLoop", "decision_line"]


class AdaptiveLoop:
    """One process' part in choosing group and micro-batch sizes; all ranks call the same, in step, between batches.

    A framework calls `start` before the first batch, and again where what a batch is made of has changed. While there
    is a size `wanted`, it measures micro-batches of it, and gives `take` what it found: `alone` on their own, else in
    batches that train in groups of one. From then on `choose` says how to train the next batch; the framework cuts the
    batch's samples accordingly (`evenpipe.tuner.samples`). Where micro-batches differ in what they save, it has
    `note` told, after each batch, what the largest so far took.

    `log` is given a line for each decision, and `resumed` whether the loaded state is gone on with. `interval` counts
    iterations between decisions; None: so many as take an hour.
    """

    def __init__(
        self, interval: int | None, log: Callable[[str], None], resumed: Callable[[bool], None], alone: bool
    ) -> None:
        self.wanted: int | None = None
        self.explored: Explored | None = None
        self._exploration: Generator[int, Sequence[Measured], Explored]
        self._stages = 0
        self._interval = interval
        self._log = log
        self._resumed = resumed
        self._alone = alone
        self._state: Mapping[str, Any] | None = None
        self._iteration = 0
        self._before: tuple[int, int] | None = None  # (k, b) of the last decision

    @property
    def tuner(self) -> Tuner | None:
        """What decides; None until all sizes that matter have been measured."""
        return None if self.explored is None else self.explored.tuner

    @property
    def predicted_saved_bytes(self) -> tuple[int, ...]:
        """Per stage, the most that one of its processes saves under the candidates that have been decided for."""
        assert self.explored is not None, "nothing has been tuned yet"
        return self.explored.conditions.predicted_saved_bytes(self.explored.tuner.used)

    def start(
        self, schedule: GroupedSchedule, samples: int, sizes: Sequence[int], limit_bytes: int, differ: bool = False
    ) -> None:
        """Forget what was measured: batches of a replica have `samples`, in micro-batches of one of `sizes`.

        `limit_bytes` is the memory of a process. Micro-batches that `differ` need not save what was measured.
        """
        self.explored = None
        self._stages = schedule.stages

        def resumed(conditions: Conditions) -> Explored | None:
            state, self._state = self._state, None
            if state is None:
                return None
            found = conditions.resumed(state, sizes, self._interval, self._iteration)
            if found is not None and found.tuner.current is not None:
                self._before = found.tuner.current.k, found.tuner.current.b
            self._resumed(found is not None)
            return found

        self._exploration = explore(schedule, samples, sizes, limit_bytes, self._interval, resumed, self._alone, differ)
        self.wanted = next(self._exploration)

    def take(self, mine: Measured, executor: Executor, iteration: int) -> None:
        """Before `iteration`: what this process has measured of micro-batches of the size that was `wanted`.

        Raises PlanError, on all ranks, where no candidate fits the limit.
        """
        self._iteration = iteration
        try:
            found = of_all_stages(mine, executor.stage_index, self._stages, executor.device)
            self.wanted = self._exploration.send(found)
        except StopIteration as done:
            self.wanted, self.explored = None, done.value
        if executor.device.type == "cuda":
            torch.cuda.empty_cache()  # of blocks of a size that will not be asked for again

    def due(self, iteration: int) -> bool:
        """Whether `choose` will measure the links before `iteration`."""
        return self.explored is not None and self.explored.tuner.due(iteration)

    def choose(self, executor: Executor, iteration: int, samples: int) -> Candidate:
        """The candidate for `iteration`: the one of before, or, where a decision is due, what rank 0 decides.

        Raises ValueError if this is no batch of as many `samples` as it was started for.
        """
        assert self.explored is not None, "sizes are still to be measured"
        conditions, tuner = self.explored
        if samples != conditions.samples:
            raise ValueError(
                f"a batch of {samples} samples after one of {conditions.samples}: group sizes that are tuned need "
                "batches of one size; leave batch-size ramp-up out, or name a group size"
            )
        if tuner.due(iteration):
            start = time.monotonic()
            sample_bytes = max(stage.message_bytes for stage in conditions.memory)
            messages = {candidate.b: candidate.b * sample_bytes for candidate in tuner.candidates}
            where = executor.connections, executor.stage_index, self._stages
            saved = {b: [unit_bytes(stage, b) for stage in conditions.memory] for b in messages}
            decided = retune(tuner, *where, messages, saved, iteration, executor.device)
            self._log(decision_line(decided, self._before, time.monotonic() - start))
            self._before = decided.k, decided.b
        assert tuner.current is not None
        return tuner.current

    def note(self, largest: Measured, executor: Executor, iteration: int) -> None:
        """After `iteration`: the most bytes that a micro-batch has needed in this process so far; times do not matter.

        What does not fit any more is no candidate from here on. If that is the present one, a decision is due.
        """
        assert self.explored is not None, "sizes are still to be measured"
        tuner = self.explored.tuner
        size = (tuner.current or tuner.candidates[0]).b
        found = of_all_stages(largest, executor.stage_index, self._stages, executor.device)
        self.explored, said = self.explored.grown([stage_memory(one, size) for one in found])
        if said:
            self._log(f"iteration {iteration + 1}: micro-batches save more than all before: {said}")

    def state_dict(self) -> dict[str, Any] | None:
        """What a run needs to go on as this one would, as JSON has it, the same on all ranks; None until tuned."""
        return None if self.explored is None else self.explored.conditions.state_dict(self.explored.tuner)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Before `start`. Where the state is of other batches, memory or limits, candidates are found anew."""
        self._state = state


def decision_line(decided: Retune, before: tuple[int, int] | None, seconds: float) -> str:
    """A decision for people; `before` is the (k, b) that it is in place of, `seconds` how long it took."""
    now = decided.k, decided.b
    was = "" if before is None else " (as before)" if before == now else f" (was k={before[0]}, b={before[1]})"
    estimates = ", ".join(f"{name} {ms:,.{1 if ms < 100 else 0}f} ms" for name, ms in decided.estimates_ms.items())
    return (
        f"iteration {decided.iteration + 1}: k={decided.k}, b={decided.b}{was}; estimates: {estimates}; "
        f"links measured in {seconds:.1f} s"
    )
