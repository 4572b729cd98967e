"""Swaps under a cap: after a run's first batch, each stage's least that leaves for the host, by what was saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from evenpipe.runtime.executor import Executor
from evenpipe.runtime.host_swaps import HostLimit
from evenpipe.runtime.resources import highest_of_all
from evenpipe.schedule import LEVELS, Level, LevelsOfStages, Programs, Schedule, ScheduleError, Size, swapping_at
from evenpipe.schedule.swap_room import Saved, SwapRoom
from evenpipe.tuner.process_memory import Room
from evenpipe.tuner.searching import UNDER_WAY

__all__ = ["SwapLoop"]

_MIB: Final = 2**20


class _Stage(NamedTuple):
    """What one stage may hold of micro-batches, in bytes, and what these save, by chunk."""

    limit_bytes: float
    saved: dict[int, Saved]


class _Answer(NamedTuple):
    level: Level
    share: float


class SwapLoop:
    """One process' part in swaps that keep each stage under a cap; all ranks call the same, in step.

    In the first batch all that can leave does, and comes back just before its backward: the least memory that swaps can
    do with. It shows what micro-batches save. From the second on each stage swaps at the first of `LEVELS` that keeps
    it under the cap, the smallest share that does, and nothing where all fits. Batches of another number of
    micro-batches are decided anew.

    Have the executor swap under `limit`, and measure a batch if it `weighs`. For each batch, a framework trains by
    `programs`, and calls `end`. `log` is given a line for each decision.
    """

    def __init__(self, log: Callable[[str], None] = lambda line: None) -> None:
        self.limit = HostLimit()
        self._log = log
        self._room = Room(0, 0)
        self._stages: list[_Stage] = []
        self._found: dict[Size, LevelsOfStages] = {}
        self._said_exceeded = False

    @property
    def weighs(self) -> bool:
        """Return whether the executor is to measure the next batch."""
        return not self._stages

    def programs(self, plain: Programs, size: Size) -> Programs:
        """Return `plain`, which swap nothing, with the swaps of batches of this size.

        Raises ScheduleError, on all ranks, where no swaps keep a stage under the cap.
        """
        swaps: Level | LevelsOfStages = LEVELS[-1]
        if self._stages:
            if size not in self._found:
                self._found[size] = self._decided(plain(size).schedule)
            swaps = self._found[size]
        return plain.swapping(swaps)

    def end(self, executor: Executor, size: Size, room: Callable[[], Room], plain: Programs) -> None:
        """After a batch: take what was seen of the first one; `room` is asked then. Raises as `programs` does."""
        if not self._stages:
            self._stages = self._gathered(executor, size, room())
            self.programs(plain, size)
        elif self.limit.is_exceeded and not self._said_exceeded:
            self._said_exceeded = True
            executor.observer.remark(
                f"stage {executor.stage_index} is over its cap, with all that can leave on the host: micro-batches save"
                " more than those of the first batch: give more memory"
            )

    def _gathered(self, executor: Executor, size: Size, room: Room) -> list[_Stage]:
        """Return all stages' limits and savings: of replicas and shards the highest numbers."""
        own, device = executor.stage_index, executor.device
        [message_bytes] = highest_of_all([executor.counter.largest_sent], device)
        used = room.static_bytes + UNDER_WAY * message_bytes
        largest = float(executor.counter.largest_saved)  # of chunks none of whose micro-batches has the time to leave
        chunks = [self.limit.saved.get(chunk, Saved(largest, largest)) for chunk in range(size.chunks)]
        row = [used, *(number for saved in chunks for number in (saved.nbytes, saved.staying, saved.first))]
        table = [row if stage == own else [0.0] * len(row) for stage in range(size.stages)]
        stages = []
        for used, *numbers in highest_of_all(table, device):
            saved = dict(enumerate(map(Saved, numbers[::3], numbers[1::3], numbers[2::3])))
            stages.append(_Stage(room.limit_bytes - used, saved))
        self._room = room
        # A copy: this stage's grows with larger micro-batches, and all ranks decide by the same numbers.
        self.limit.limit_bytes, self.limit.saved = stages[own].limit_bytes, dict(stages[own].saved)
        return stages

    def _decided(self, plain: Schedule) -> LevelsOfStages:
        """Return the level of each stage, and say what leaves."""
        answers = [self._level(stage, plain) for stage in range(plain.stages)]
        if None in answers:
            raise ScheduleError(self._refusal(plain))
        found = [answer for answer in answers if answer is not None]
        self._log(_said(found, self._stages))
        return LevelsOfStages(tuple(answer.level for answer in found))

    def _level(self, stage: int, plain: Schedule) -> _Answer | None:
        limit_bytes, saved = self._stages[stage]
        for level in LEVELS:
            share = SwapRoom(swapping_at(level, plain.actions[stage])).least_share(saved, limit_bytes)
            if share is not None:
                return _Answer(level if share else "none", share)
        return None

    def _refusal(self, plain: Schedule) -> str:
        """Return why no swaps keep all stages under the cap, and the least that would do."""
        needs = []
        for stage, (limit_bytes, saved) in enumerate(self._stages):
            rooms = [SwapRoom(swapping_at(level, plain.actions[stage])) for level in LEVELS]
            least = min(room.peak_bytes(saved, 1.0) for room in rooms)
            needs.append((self._room.limit_bytes - limit_bytes + least, least, stage))
        most, least, stage = max(needs)
        return (
            f"no swaps keep stage {stage} under it: it holds {(most - least) / _MIB:,.1f} MiB of weights, gradients, "
            f"optimizer and messages, and with all that can leave on the host {least / _MIB:,.1f} MiB of micro-batches"
            f": give at least {math.ceil(most / 2**30 * 1e4) / 1e4:g} GiB, a smaller micro-batch, or recomputation"
        )


def _said(answers: list[_Answer], stages: list[_Stage]) -> str:
    """Return a line of what each stage may hold, and what it swaps."""
    rooms = " ".join(f"{stage.limit_bytes / _MIB:.2f}" for stage in stages)
    if not any(answer.share for answer in answers):
        return f"nothing is swapped, for all fits; room for micro-batches, MiB by stage: {rooms}"
    shares = " ".join(f"{answer.share:.0%}" for answer in answers)
    late = ", ".join(str(stage) for stage, answer in enumerate(answers) if answer.level == "late")
    waits = f"; stages that wait for each copy: {late}" if late else ""
    return f"swaps of each micro-batch by stage: {shares}; room for all of them, MiB: {rooms}{waits}"
