"""Which parts of the model are computed again: those for which justified list schedules are fastest within the caps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from evenpipe.order_search.clock import NEVER, makespan
from evenpipe.order_search.compiled import COMPILED
from evenpipe.order_search.justifying import justified
from evenpipe.order_search.listing import listed
from evenpipe.order_search.problem import Problem

__all__ = ["quick_ms", "recomputations"]

#: Micro-batches a stage, and orders of each choice, by which choices are compared.
_COMPARED: Final = 3
_JUSTIFIED: Final = 4


def recomputations(problem: Problem) -> list[frozenset[int]]:
    """Return one or two choices of parts to compute again, by their positions: the fastest, and none where that fits.

    Looked at are all that can be, those of one model chunk, and none; the best of these is changed, one part after
    another, as long as that makes it faster.
    """
    none, able = frozenset[int](), problem.recomputable
    if not able:
        return [none]
    times = {choice: _of_choice(problem, choice) for choice in (none, *_choices(problem, able))}
    found = min(times, key=lambda choice: times[choice])
    if times[found] >= NEVER:
        return [able]  # which needs least
    changed = COMPILED
    while changed:
        changed = False
        for position in sorted(able):
            other = found ^ {position}
            if other not in times:
                times[other] = _of_choice(problem, other)
            if times[other] < times[found] - 1e-9:
                found, changed = other, True
    return [found, none] if found and times[none] < NEVER else [found]


def _choices(problem: Problem, able: frozenset[int]) -> Iterator[frozenset[int]]:
    for chunk in range(problem.places.chunks):
        yield able & {at for at, place in enumerate(problem.places.order) if place.chunk == chunk}
    yield able


def _of_choice(problem: Problem, choice: frozenset[int]) -> float:
    return quick_ms(replace(problem, recomputed=choice))


def quick_ms(problem: Problem) -> float:
    """Return the milliseconds of the best of a few orders of not so many micro-batches; NEVER where none fits."""
    few = replace(problem, micro_batches=min(problem.micro_batches, _COMPARED * problem.places.stages))
    orders = sorted(filter(few.fits, listed(few)), key=lambda order: makespan(few, order))
    return min((makespan(few, justified(few, order, 2)) for order in orders[:_JUSTIFIED]), default=NEVER)
