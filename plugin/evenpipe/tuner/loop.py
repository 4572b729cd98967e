"""Ada-Grouper's online half: sizes are measured (§5.2), then candidates are chosen, batch by batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from evenpipe.runtime.executor import Executor
from evenpipe.tuner.group_memory import (
    Measured,
    PlanError,
    StageMemory,
    candidates,
    peak_bytes,
    saved_peaks,
    stage_memory,
    stage_times,
    unit_bytes,
)
from evenpipe.tuner.grouped import Candidate, GroupedSchedule
from evenpipe.tuner.links import Ends, of_all_stages, retune
from evenpipe.tuner.tuner import Retune, Tuner, thinned_out

__all__ = ["AdaptiveLoop", "Conditions", "Explored", "decision_line", "explore"]

_FORMAT: Final = "evenpipe.tuner/1"
#: Memory that differs by less is the same.
_SAME: Final = 0.01


class Conditions(NamedTuple):
    """The conditions that a tuned run's candidates follow from; the same on all ranks.

    A saved tuner is of use for the same conditions. `schedule` trains `samples` in a replica's batch, `limit_bytes` is
    the memory limit of a process, and `memory` is what stages need. Where micro-batches `differ`, as in length,
    `memory` is what the largest so far has needed.
    """

    schedule: GroupedSchedule
    samples: int
    limit_bytes: int
    memory: tuple[StageMemory, ...]
    differ: bool = False

    def fitting(self, sizes: Sequence[int]) -> tuple[Candidate, ...]:
        """The candidates to tune among, with micro-batches of one of `sizes`. Raises PlanError where none fits."""
        return thinned_out(candidates(self.memory, self.samples, self.limit_bytes, self.schedule, sizes))

    def predicted_saved_bytes(self, used: Sequence[Candidate]) -> tuple[int, ...]:
        """Per stage, the most that one of its processes saves for backwards under any of `used`."""
        peaks = [saved_peaks(self.memory, candidate, self.schedule) for candidate in used]
        return tuple(map(max, zip(*peaks, strict=True)))

    def state_dict(self, tuner: Tuner) -> dict[str, Any]:
        """Return what a run needs to go on tuning as this one would, as JSON has it; the same on all ranks."""
        return {**self._named(), "memory": [list(stage) for stage in self.memory], "tuner": tuner.state_dict()}

    def resumed(
        self, state: Mapping[str, Any], sizes: Collection[int], interval: int | None, iteration: int
    ) -> Explored | None:
        """Before `iteration`, what a run goes on with that gave `state`; None if that one's conditions were others."""
        memory = tuple(StageMemory(*stage) for stage in state.get("memory", ()))
        alike = _alike(memory, self.memory, static_only=self.differ)
        if not self._named().items() <= state.items() or not alike:
            return None
        tuner = Tuner(self.schedule, (), {}, interval)
        tuner.load_state_dict(state["tuner"], iteration)
        if not {candidate.b for candidate in tuner.candidates} <= set(sizes):
            return None
        if not self.differ:
            return Explored(self, tuner)
        return Explored(self._replace(memory=memory), tuner).grown(self.memory)[0]

    def _named(self) -> dict[str, Any]:
        """Return the conditions that have to be the same to the last digit."""
        return {
            "format": _FORMAT,
            "schedule": self.schedule.programs.spec.name,
            "samples": self.samples,
            "bpipe": self.schedule.programs.bpipe,
            "limit_bytes": self.limit_bytes,
        }


class Explored(NamedTuple):
    """The conditions and the tuner that a run is tuned with from now on."""

    conditions: Conditions
    tuner: Tuner

    def grown(self, memory: Sequence[StageMemory]) -> tuple[Explored, str]:
        """From the next decision on, with what still fits where stages have needed `memory` too; and what to say of it.

        A run that trains goes on: where nothing fits any more, the smallest is left.
        """
        conditions, tuner = self
        largest = tuple(StageMemory(*map(max, *both)) for both in zip(conditions.memory, memory, strict=True))
        if largest == conditions.memory:
            return self, ""
        conditions, before = conditions._replace(memory=largest), tuner.candidates
        sizes = sorted({candidate.b for candidate in before})
        try:
            tuner.candidates, said = conditions.fitting(sizes), ""
        except PlanError as error:
            tuner.candidates, said = (Candidate(1, sizes[0], conditions.samples // sizes[0]),), str(error)
        most = max(tuner.candidates).k
        if not said and most < max(before).k:
            said = f"groups of more than {most} no longer fit"
        return Explored(conditions, tuner), said


def explore(
    schedule: GroupedSchedule,
    samples: int,
    sizes: Sequence[int],
    limit_bytes: int,
    interval: int | None,
    resumed: Callable[[Conditions], Explored | None],
    alone: bool,
    differ: bool = False,
) -> Generator[int, Sequence[Measured], Explored]:
    """Asks for one of `sizes` after the other, and is sent what each stage measured of it.

    `samples` are those of a replica's batch. The smallest size comes first: if it does not fit, nothing does. The next
    one shows what grows with samples, if it can be measured within `limit_bytes`: `alone` a micro-batch is on its own,
    otherwise a batch of them trains, in groups of one. Then come the sizes of candidates, which fit in larger groups
    too, unless an earlier run is `resumed`. Raises PlanError where no candidate fits.
    """
    smallest, *larger = sorted(sizes)
    found = {smallest: (yield smallest)}
    memory = tuple(stage_memory(small, smallest) for small in found[smallest])
    if larger:
        size = larger[0]
        if alone:
            needed = max(stage.static_bytes + unit_bytes(stage, size) for stage in memory)
        else:
            needed = max(peak_bytes(memory, Candidate(1, size, samples // size), schedule))
        if needed <= limit_bytes:
            found[size] = yield size
            pairs = zip(found[smallest], found[size], strict=True)
            memory = tuple(stage_memory(few, smallest, more, size) for few, more in pairs)
    conditions = Conditions(schedule, samples, limit_bytes, memory, differ)
    going_on = resumed(conditions)
    if going_on is not None:
        return going_on
    fitting = conditions.fitting(sizes)
    for size in sorted({candidate.b for candidate in fitting} - found.keys()):
        found[size] = yield size
    times = {size: stage_times(measured) for size, measured in found.items()}
    return Explored(conditions, Tuner(schedule, fitting, times, interval))


def _alike(saved: Sequence[StageMemory], now: Sequence[StageMemory], static_only: bool) -> bool:
    """Return whether runs hold the same, but for what libraries of other versions may keep."""
    compared = 1 if static_only else None
    return len(saved) == len(now) and all(
        math.isclose(before, after, rel_tol=_SAME)
        for one, other in zip(saved, now, strict=True)
        for before, after in zip(one[:compared], other[:compared], strict=True)
    )


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
        """Return the tuner, which decides; None until all sizes that matter have been measured."""
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
        """Return whether `choose` will measure the links before `iteration`."""
        return self.explored is not None and self.explored.tuner.due(iteration)

    def choose(self, executor: Executor, iteration: int, samples: int) -> Candidate:
        """Return the candidate for `iteration`: the one of before, or, where a decision is due, what rank 0 decides.

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
            ends = Ends(executor.connections, executor.stage_index, self._stages, executor.device)
            saved = {b: [unit_bytes(stage, b) for stage in conditions.memory] for b in messages}
            decided = retune(tuner, ends, messages, saved, iteration)
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
        """Return what a run needs to go on as this one would, as JSON has it; None until tuned.

        It is the same on all ranks.
        """
        return None if self.explored is None else self.explored.conditions.state_dict(self.explored.tuner)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Before `start`. Where the state is of other batches, memory or limits, candidates are found anew."""
        self._state = state


def decision_line(decided: Retune, before: tuple[int, int] | None, seconds: float) -> str:
    """Return a decision for people; `before` is the (k, b) that it is in place of, `seconds` how long it took."""
    now = decided.k, decided.b
    was = "" if before is None else " (as before)" if before == now else f" (was k={before[0]}, b={before[1]})"
    estimates = ", ".join(f"{name} {ms:,.{1 if ms < 100 else 0}f} ms" for name, ms in decided.estimates_ms.items())
    return (
        f"iteration {decided.iteration + 1}: k={decided.k}, b={decided.b}{was}; estimates: {estimates}; "
        f"links measured in {seconds:.1f} s"
    )
