"""The front of memory against time: every known schedule of a model, and what is searched at several amounts of memory.

All points are of one model. Its parts are placed as each schedule places them: one after the other for schedules with
one part a stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

from evenpipe.order_search.costs import RunCosts
from evenpipe.order_search.problem import Problem
from evenpipe.order_search.search import USUAL, Effort
from evenpipe.schedule import SEARCHED, Program, ScheduleError, Size, build, find, loop, own, vee
from evenpipe.simulate.costs import Costs, placed_parts, saved_and_left_bytes, whole_backward_bytes
from evenpipe.simulate.searched import searched
from evenpipe.simulate.simulator import simulate

__all__ = ["MEMORY_SHARES", "Front", "Point", "front"]

#: Amounts of memory, as parts of what 1F1B's fullest stage saves.
MEMORY_SHARES: Final = (0.25, 0.34, 0.4, 0.5, 0.625, 0.75, 0.875, 1.0, 1.25)


class Point(NamedTuple):
    """A schedule: the most bytes that a stage saves under it, and the milliseconds of a batch."""

    name: str
    peak_bytes: int
    batch_ms: float


class Front(NamedTuple):
    """``limit_ms``: the busiest stage of the searched placement computes all the time.

    ``base_bytes``: what 1F1B's fullest stage saves. ``searched``: one for each of MEMORY_SHARES that holds a
    micro-batch; its ``peak_bytes`` are the cap. ``evicting``: the same with one part a stage, which may evict to its
    partner; none, where the costs do not say how fast.
    """

    limit_ms: float
    base_bytes: int
    known: list[Point]
    searched: list[Point]
    evicting: list[Point]

    def best(self, within: int) -> Point | None:
        """Return the fastest known schedule that saves no more."""
        return min((one for one in self.known if one.peak_bytes <= within), key=lambda one: one.batch_ms, default=None)


def front(
    costs: RunCosts,
    stages: int,
    micro_batches: int,
    effort: Effort = USUAL,
    split: bool = True,
    told: Callable[[str], None] = lambda line: None,
) -> Front:
    """Return the front of a model on so many stages; caps that ``costs`` names do not count.

    Evictions are free, if the costs do not say how fast they are. ``effort``: of each amount of memory. ``split``:
    backwards that are searched come in halves. Raises :class:`ScheduleError` where the parts are not as many as stages
    need, or save nothing.
    """
    costs = costs.model_copy(update={"memory_bytes": None})
    known = list(_known(costs, stages, micro_batches))
    base_bytes = next(one.peak_bytes for one in known if one.name == "1f1b")
    if not base_bytes:
        raise ScheduleError("costs: no part saves anything: give saved_bytes")
    alone = costs.model_copy(update={"peer_bytes_per_ms": None})

    def points(placed: RunCosts, name: str) -> Iterator[Point]:
        problem, before_ms, before = Problem.of(placed, stages, micro_batches, split), math.inf, 0
        recomputed = replace(problem, recomputed=problem.recomputable)
        least = int(min(problem.least_bytes.max(), recomputed.least_bytes.max()))
        for share in MEMORY_SHARES:
            cap = int(share * base_bytes)
            if cap < least or cap == before:
                continue
            told(f"{name}: {share:g} of 1F1B's memory, {cap:,} bytes")
            capped = placed.model_copy(update={"memory_bytes": [cap] * stages})
            found = searched(capped, stages, micro_batches, effort, split=split)
            # What fits into less fits; it may have been annealed to other errors.
            before_ms, before = min(found.batch_ms, before_ms), cap
            yield Point(name, cap, before_ms)

    evicting = costs.straight(stages) if costs.peer_bytes_per_ms is not None else None
    return Front(
        Problem.of(costs, stages, micro_batches, split).limit_ms,
        base_bytes,
        known,
        list(points(alone, SEARCHED)),
        [] if evicting is None else list(points(evicting, f"{SEARCHED} + BPipe")),
    )


def _known(costs: RunCosts, stages: int, micro_batches: int) -> Iterator[Point]:
    chunks = costs.places(stages).chunks
    straight = costs.straight(stages)
    for spec in map(find, own()):
        if "stream" in spec.needs:  # its gradients are late
            continue
        of_one = spec.chunks[0] == 1
        size = Size(stages, micro_batches, 1 if of_one else chunks, 2 if "groups" in spec.needs else 1)
        for bpipe in (False, True):
            with suppress(ScheduleError):  # there is no such size, or nothing to level
                program = build(spec, size, bpipe)
                placed = straight if of_one else _placed(costs, program)
                if placed is not None:
                    yield _point(spec.name + " + BPipe" * bpipe, program, placed)


def _placed(costs: RunCosts, program: Program) -> RunCosts | None:
    """The same parts as the program places them; None for other parts, or a placement that has no name."""
    size, places = program.schedule, program.schedule.places
    if size.chunks != costs.places(size.stages).chunks:
        return None
    named = {"loop": loop(size.stages, size.chunks), "vee": vee(size.stages, size.chunks)}
    name = next((name for name, made in named.items() if made == places), None)
    return None if name is None else costs.model_copy(update={"placement": name})


def _point(name: str, program: Program, costs: RunCosts) -> Point:
    schedule = program.schedule
    placed = placed_parts(costs, schedule)
    simulation = simulate(program, Costs.of_parts(costs, schedule), *saved_and_left_bytes(placed))
    each = zip(simulation.stages, whole_backward_bytes(placed, schedule), strict=True)
    return Point(name, max(stage.peak_bytes + more for stage, more in each), simulation.makespan_ms)
