"""Before a run is tuned: what every stage needs, and what it takes for micro-batches of the sizes that there may be."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from evenpipe.megatron.adaptive.given import Given
from evenpipe.megatron.adaptive.rehearsal import Rehearsal, message_bytes, workspace_bytes
from evenpipe.megatron.schedule import Call
from evenpipe.planner import StageMemory, StageTimes
from evenpipe.tuner.collective import highest_of_all

__all__ = ["Preparation"]


class Preparation:
    """Rehearses batches like `given`, of which this process' loader has `loaded` (nothing where it reads nothing).

    All ranks do the same, in step, and learn the same. `call_of` makes of arguments what is carried out.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        given: Given,
        loaded: Sequence[Any],
        call_of: Callable[..., Call],
        around_batch: Callable[[int], AbstractContextManager[Any]],
    ) -> None:
        self._rehearsal = rehearsal
        self._given = given.reading(itertools.cycle(loaded) if given.source is not None else None)
        self._call_of = call_of
        self._around_batch = around_batch
        pipeline = call_of(**given.arguments).pipeline
        self._stage, self._stages = pipeline.rank(), pipeline.size()

    def memory(self, sizes: Sequence[int], static_bytes: int, limit_bytes: int) -> tuple[StageMemory, ...]:
        """By stage: from the smallest of `sizes`, and from the next one to see what grows with samples.

        What could not fit into `limit_bytes` is not tried: two micro-batches at a time, which show what is shared, or
        the larger ones. Without them a micro-batch is taken to share nothing, and to save in proportion to its samples.
        """
        smallest, *larger = sorted(sizes)[:2]

        def fits(nbytes: int) -> bool:
            """On no rank more than there is: all do it, or none."""
            return bool(highest_of_all([static_bytes + nbytes - limit_bytes], self._rehearsal.device)[0] <= 0)

        with self._around_batch(smallest):
            call = self._call_of(**self._given.in_micro_batches_of(smallest))
            saved = self._rehearsal.saved_bytes(call, fits)
        message, workspace = message_bytes(call) // smallest, -(-workspace_bytes() // smallest)
        each, shared = saved.by_each, saved.shared
        by_sample, fixed = -(-each // smallest), 0
        if larger and fits(each * larger[0] // smallest):
            with self._around_batch(larger[0]):
                more = self._rehearsal.saved_by_one(self._call_of(**self._given.in_micro_batches_of(larger[0])))
            by_sample = -(-(more - shared - each) // (larger[0] - smallest))
            fixed = max(0, each - smallest * by_sample)
        mine = StageMemory(static_bytes, shared, fixed, by_sample, message, workspace)
        [rows] = self._of_all_stages([mine])
        return tuple(StageMemory(*map(int, row)) for row in rows)

    def times(self, sizes: Iterable[int]) -> dict[int, StageTimes]:
        """Of micro-batches of each of `sizes`, which must fit."""
        sizes = sorted(sizes)
        tables = self._of_all_stages([self._times_ms(size) for size in sizes])
        return {size: StageTimes(*zip(*table, strict=True)) for size, table in zip(sizes, tables, strict=True)}

    def _times_ms(self, size: int) -> tuple[float, float]:
        with self._around_batch(size):
            return self._rehearsal.times_ms(self._call_of(**self._given.in_micro_batches_of(size)))

    def _of_all_stages(self, rows: Sequence[Sequence[float]]) -> list[list[list[float]]]:
        """Every stage's rows: of all replicas and shards the highest numbers."""
        table = [[row if at == self._stage else [0.0] * len(row) for at in range(self._stages)] for row in rows]
        found: list[list[list[float]]] = highest_of_all(table, self._rehearsal.device)
        return found
