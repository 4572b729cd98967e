"""Before the first batch: what every stage needs and takes, which candidates fit, and a tuner that knows them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from evenpipe.megatron.adaptive.given import Given
from evenpipe.megatron.adaptive.rehearsal import Rehearsal, message_bytes, workspace_bytes
from evenpipe.megatron.schedule import Call
from evenpipe.planner import Candidate, StageMemory, StageTimes, candidates
from evenpipe.tuner.collective import highest_of_all
from evenpipe.tuner.tuner import worth_telling_apart

__all__ = ["Limits", "Preparation", "Prepared"]


class Prepared(NamedTuple):
    """The same on all ranks: memory by stage, the candidates that fit, and stage times by micro-batch size."""

    memory: tuple[StageMemory, ...]
    candidates: tuple[Candidate, ...]
    times: dict[int, StageTimes]


class Limits(NamedTuple):
    """What a process needs besides activations, and what it may need in all; whether memory is levelled by BPipe."""

    static_bytes: int
    limit_bytes: int
    bpipe: bool


class Preparation:
    """Of one process, for calls of which `call_of` makes what is carried out; all ranks do the same, in step."""

    def __init__(
        self,
        rehearsal: Rehearsal,
        call_of: Callable[..., Call],
        around_batch: Callable[[int], AbstractContextManager[Any]],
    ) -> None:
        self._rehearsal = rehearsal
        self._call_of = call_of
        self._around_batch = around_batch

    def prepare(self, given: Given, loaded: Sequence[Any], sizes: Sequence[int], limits: Limits) -> Prepared:
        """For batches like `given`, whose loader's micro-batches are `loaded` (if any), in micro-batches of `sizes`.

        Raises PlanError, on all ranks, where nothing fits.
        """
        reading = given.reading(itertools.cycle(loaded) if given.source is not None else None)
        whole = self._call_of(**given.arguments)
        stage, stages = whole.pipeline.rank(), whole.pipeline.size()
        with self._rehearsal.without_a_trace(whole):
            mine = self._memory(reading, sorted(sizes)[:2], limits.static_bytes)
            memory = tuple(StageMemory(*map(int, row)) for row in self._of_all_stages([mine], stage, stages)[0])
            fitting = candidates(memory, given.samples, limits.limit_bytes, limits.bpipe, sizes)
            chosen = worth_telling_apart(fitting)
            used = sorted({candidate.b for candidate in chosen})
            tables = self._of_all_stages([self._times_ms(reading, b) for b in used], stage, stages)
        times = {b: StageTimes(*zip(*table, strict=True)) for b, table in zip(used, tables, strict=True)}
        return Prepared(memory, chosen, times)

    def _memory(self, reading: Given, sizes: Sequence[int], static_bytes: int) -> StageMemory:
        """From the two smallest sizes, as what a micro-batch saves grows with its samples."""
        saved = []
        for size in sizes:
            with self._around_batch(size):
                call = self._call_of(**reading.in_micro_batches_of(size))
                saved.append(self._rehearsal.saved_bytes(call))
        smallest, largest = sizes[0], sizes[-1]
        more = saved[-1].by_each - saved[0].by_each
        by_sample = -(-more // (largest - smallest)) if largest > smallest else -(-saved[0].by_each // smallest)
        fixed = saved[0].by_each - smallest * by_sample
        message, workspace = message_bytes(call) // largest, -(-workspace_bytes() // largest)
        return StageMemory(static_bytes, saved[0].shared, max(0, fixed), by_sample, message, workspace)

    def _times_ms(self, reading: Given, size: int) -> tuple[float, float]:
        with self._around_batch(size):
            return self._rehearsal.times_ms(self._call_of(**reading.in_micro_batches_of(size)))

    def _of_all_stages(self, rows: Sequence[Sequence[float]], stage: int, stages: int) -> list[list[list[float]]]:
        """Every stage's rows: of all replicas and shards the highest numbers."""
        table = [[row if at == stage else [0.0] * len(row) for at in range(stages)] for row in rows]
        found: list[list[list[float]]] = highest_of_all(table, self._rehearsal.device)
        return found
