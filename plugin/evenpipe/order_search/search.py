"""Search an order for given times and caps: starts of all kinds, justified, the best annealed over errors of times.

Moves are counted, not seconds: the same problem and the same seed give the same order on every machine with the same
libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from evenpipe.order_search.annealing import Cooling, Samples, anneal
from evenpipe.order_search.blocks import blocks, closed_up_order, repeated_order
from evenpipe.order_search.clock import NEVER, makespan
from evenpipe.order_search.compiled import COMPILED
from evenpipe.order_search.justifying import justified
from evenpipe.order_search.listing import listed
from evenpipe.order_search.problem import Numbers, Order, Problem
from evenpipe.schedule.actions import ScheduleError
from evenpipe.schedule.known import find, own
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.spec import Size
from evenpipe.schedule.topology import vee

__all__ = ["EXPECTED", "USUAL", "Effort", "Errors", "Found", "search"]

#: Two chains on the given times, and then four on times with errors; the best of these goes on, as long as two.
_NOMINAL: Final = (Cooling(), Cooling(hot=0.5, cold=0.003, reach=4.0))
_ROBUST: Final = 4
_CHAINS: Final = 8
#: Nanoseconds of a move, and more of them for each action and sample, on one core of 2024: to make moves of seconds.
_MOVE_NS: Final = 700.0
_ACTION_NS: Final = 0.05
_MOST_MOVES: Final = 1_000
_MOST_ACTIONS: Final = 500_000
#: Of more than these actions × samples, moves take longer than that; samples, of which there are as many all the same.
_CACHED: Final = 200_000
_LEAST_SAMPLES: Final = 8
#: Starts among which the best for wrong times is chosen; results that are left to the simulator to choose from.
_JUDGED: Final = 32
_FEW: Final = 4
_TIMES: Final = ("forward_ms", "input_gradient_ms", "weight_gradient_ms")
#: For many micro-batches, blocks are compared among so many a stage, and so many of each form go on.
_COMPARED: Final = 3
_LONG: Final = 24


class Errors(NamedTuple):
    """How wrong times may be, as standard deviations, in parts of the time: of all of a stage, and of each action.

    ``message``: messages take 1 + |x| times as long as was said, where x has this standard deviation.
    """

    stage: float = 0.05
    action: float = 0.05
    message: float = 0.5

    def samples(self, problem: Problem, count: int, seed: int) -> Samples:
        """Return the problem's own times, and ``count`` − 1 with errors."""
        random = np.random.default_rng(seed)
        stages, actions = problem.places.stages, len(problem.takes_ms)
        of_stage = 1 + self.stage * random.standard_normal((count, stages))
        of_action = 1 + self.action * random.standard_normal((count, actions))
        longer = 1 + abs(self.message * random.standard_normal(count))
        factor = np.maximum(0.1, of_stage[:, problem.graph.stage] * of_action)
        factor[0] = longer[0] = 1.0
        return Samples(problem.takes_ms * factor, longer)


class Effort(NamedTuple):
    """``seconds``: of annealing, about so many of one core at most. ``samples``: of times with errors."""

    seconds: float = 10.0
    samples: int = 32
    seed: int = 0

    def count(self, actions: int) -> int:
        """Return of how many samples so many actions fit into the caches of a core."""
        return min(self.samples, max(_LEAST_SAMPLES, _CACHED // actions))

    def moves(self, actions: int, samples: int) -> int:
        """Return how many moves one chain has; more than so many an action find nothing more."""
        move_ns = _MOVE_NS + _ACTION_NS * actions * samples
        return min(_MOST_MOVES * actions, int(self.seconds / _CHAINS * 1e9 / move_ns))


class Found(NamedTuple):
    """``best``: a few orders, the best first. ``published``: those that fit of named ones, and of a few blocks."""

    best: list[Schedule]
    published: list[Schedule]


EXPECTED: Final = Errors()
USUAL: Final = Effort()


def search(
    problem: Problem,
    effort: Effort = USUAL,
    errors: Errors = EXPECTED,
    told: Callable[[str], None] = lambda line: None,
) -> Found:
    """Return orders for ``problem``, within its caps, which are still to be verified. ``told`` gets a line a step.

    Without numba only the best starts are justified, and nothing is annealed. Raises :class:`ScheduleError` where a
    stage cannot hold one micro-batch, which is the least of any order, and for more actions than can be searched.
    """
    actions = len(problem.kinds) * len(problem.parts) * problem.micro_batches
    if actions > _MOST_ACTIONS:
        raise ScheduleError(
            f"micro_batches={problem.micro_batches}: makes {actions:,} actions, and an order of at most "
            f"{_MOST_ACTIONS:,} is searched: give less"
        )
    _check_caps(problem)
    count = effort.count(actions) if any(errors) else 1
    # What was annealed for some is judged by others.
    others = errors.samples(problem, 4 * count if COMPILED else count, effort.seed + 1)

    def mean_ms(order: Order) -> float:
        return float(np.mean([makespan(problem, order, *one) for one in zip(*others, strict=True)]))

    def said(order: Order, how: str) -> None:
        told(f"{how}: {problem.limit_ms / makespan(problem, order):.1%} of the limit")

    named = [order for order in _known(problem) if problem.fits(order)]
    published = [*named, *_repeated(problem)]
    starts = {order.tobytes(): order for order in _starts(problem, published)}
    found = sorted(starts.values(), key=lambda order: makespan(problem, order))
    said(found[0], f"best of {len(found):,} orders")
    some = found[:_JUDGED]
    if COMPILED and effort.seconds > 0:
        moves = effort.moves(len(problem.takes_ms), 1)
        exact = [
            anneal(problem, order, moves, effort.seed + number, cooling)[0]
            for number, (order, cooling) in enumerate(zip(found, _NOMINAL, strict=False))
        ]
        said(min(exact, key=lambda order: makespan(problem, order)), "annealed")
        if count > 1:
            samples = errors.samples(problem, count, effort.seed)
            exact += _annealed_for(samples, problem, [*exact, *some], mean_ms, effort)
        some += exact
    # With the times that were given, it is never slower than what is published, whatever it gains by wrong ones.
    most_ms = min((makespan(problem, order) for order in published), default=NEVER)
    able = sorted((order for order in some if makespan(problem, order) <= most_ms + 1e-9), key=mean_ms)
    said(able[0], "best where times are a little wrong")
    repeated = sorted(published[len(named) :], key=lambda order: makespan(problem, order))
    known = [*named, *repeated[:_FEW]]
    return Found(*([_schedule(problem, order) for order in orders] for orders in (able[:_FEW], known)))


def _annealed_for(
    samples: Samples, problem: Problem, starts: Sequence[Order], mean_ms: Callable[[Order], float], effort: Effort
) -> Iterator[Order]:
    """Yield orders annealed for times with errors: from the best starts, and from the best of what these become."""
    moves = effort.moves(len(problem.takes_ms), len(samples.longer))
    by_mean = {mean_ms(order): order for order in starts}  # one of those that are as good
    made = [
        anneal(problem, by_mean[ms], moves, effort.seed + number, Cooling(), samples)[0]
        for number, ms in enumerate(sorted(by_mean)[:_ROBUST])
    ]
    yield from made
    yield anneal(problem, min(made, key=mean_ms), 2 * moves, effort.seed, Cooling(), samples)[0]


def _check_caps(problem: Problem) -> None:
    for stage, (cap, least) in enumerate(zip(problem.cap, problem.least_bytes.tolist(), strict=True)):
        if cap < least:
            raise ScheduleError(
                f"costs: memory_bytes of stage {stage} is {cap:,}, and one micro-batch alone needs {least:,}: give at "
                "least that"
            )


def _repeated(problem: Problem) -> Iterator[Order]:
    """Yield the orders that fit of building blocks, made for even stages: justified, and closed up by their authors."""
    if problem.split and problem.places == vee(problem.places.stages):
        even = replace(
            problem,
            parts=[one.model_copy(update=dict.fromkeys(_TIMES, 1.0)) for one in problem.parts],
            message_ms=0.0,
        )
        for block in _fitting_blocks(problem):
            order = repeated_order(problem, block)
            if COMPILED:
                yield justified(even, order)
                yield closed_up_order(problem, block)
            else:
                yield order


def _starts(problem: Problem, published: Sequence[Order]) -> Iterator[Order]:
    """Yield orders of all kinds that fit, as they are and justified."""
    fitting = [*published, *(order for order in listed(problem) if problem.fits(order))]
    if not COMPILED:
        fitting = sorted(fitting, key=lambda order: makespan(problem, order))[:4]
    for order in fitting:
        yield order
        yield justified(problem, order)


def _known(problem: Problem) -> Iterator[Order]:
    """Yield the orders of known schedules on the same places; those of groups are for receives that come ahead."""
    size = Size(problem.places.stages, problem.micro_batches, problem.places.chunks)
    for spec in map(find, own()):
        try:
            fitted = spec.fitted(size)
            if spec.needs & {"groups", "stream"} or spec.places(fitted) != problem.places:
                continue
            rows = spec.order(fitted)
        except ScheduleError:
            continue
        if problem.split or "split" not in spec.needs:
            order = problem.order(rows)
            if makespan(problem, order) < NEVER:
                yield order


def _fitting_blocks(problem: Problem) -> list[Numbers]:
    """Return the building blocks that fit; for many micro-batches those that are best among fewer."""
    few = min(problem.micro_batches, _COMPARED * problem.places.stages)
    shorter = replace(problem, micro_batches=few)
    fitting = [one for one in blocks(problem.places.stages) if shorter.fits(repeated_order(shorter, one))]
    if few == problem.micro_batches and COMPILED:
        return fitting
    forms: list[Callable[[Numbers], Order]] = [lambda block: repeated_order(shorter, block)]
    if COMPILED:
        forms = [
            lambda block: justified(shorter, repeated_order(shorter, block), 2),
            lambda block: closed_up_order(shorter, block),
        ]
    best = {}
    for form in forms:
        by_time = sorted(fitting, key=lambda block: makespan(shorter, form(block)))
        best.update({block.tobytes(): block for block in by_time[:_LONG]})
    return list(best.values())


def _schedule(problem: Problem, order: Order) -> Schedule:
    places = problem.places
    units = places.chunks * problem.micro_batches
    schedule = Schedule(
        "searched",
        places.stages,
        problem.micro_batches,
        places.chunks,
        units,
        problem.actions(order),
        places=places,
        recomputed=problem.recomputed,
    )
    return replace(schedule, bound=max(schedule.peak_live))
