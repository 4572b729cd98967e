"""The choice of a run's schedule, among all for its placement, by the times and bytes that its batches measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar, Final, NamedTuple

from evenpipe.order_search.costs import RunCosts, held_bytes
from evenpipe.order_search.problem import Problem
from evenpipe.order_search.search import USUAL, Effort
from evenpipe.schedule import (
    AUTO,
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    Kind,
    Places,
    Program,
    Queues,
    Schedule,
    ScheduleError,
    Size,
    Spec,
    build,
    find,
    own,
    verify,
)
from evenpipe.schedule.spec import halved
from evenpipe.simulate.costs import Costs
from evenpipe.simulate.searched import searched
from evenpipe.simulate.simulator import simulate
from evenpipe.tuner.part_watch import PartWatch
from evenpipe.tuner.searching import SearchLoop

__all__ = ["TIE", "ChoiceLoop", "Option", "choose", "options"]

#: Megatron's and DeepSpeed's own orders.
_STOCK: Final = frozenset(("1f1b", "interleaved"))
#: Schedules whose times differ by less count as equally fast.
TIE: Final = 0.02
#: Larger groups keep more messages than a stage has room for beside what it saves.
_GROUPS: Final = (2, 3, 4)


class Option(NamedTuple):
    """A schedule by its name, and by simulation the milliseconds of a batch, and the most bytes that stages save."""

    name: str
    program: Program
    batch_ms: float
    saved_bytes: tuple[int, ...]

    @property
    def is_stock(self) -> bool:
        """Return whether it is the framework's own order."""
        return self.name in _STOCK

    def fits(self, costs: RunCosts) -> bool:
        """Return whether no stage saves more than it may."""
        caps = costs.caps(len(self.saved_bytes))
        return all(nbytes <= cap for nbytes, cap in zip(self.saved_bytes, caps, strict=True))


def options(
    costs: RunCosts, size: Size, queues: Queues = "many", halves: bool = False, of: Spec | None = None
) -> Iterator[Option]:
    """Yield the published schedules for these parts on their places, whatever memory they need.

    Costs that do not say how fast stages evict rule out BPipe. halves: whole backwards are run as two halves. of: the
    kind of `auto` that says whether backwards may come in halves, and whether forwards and backwards are computed
    together; by default the first. Schedules with late gradients are left out.
    """
    places, kind = costs.places(size.stages), of or find(AUTO)
    for named in map(find, own()):
        spec = named.fused_form if kind.fused else named
        if spec is None or spec.needs & {"stream", "swap", "times"} or ("split" in spec.needs - kind.needs):
            continue
        pairs = costs.peer_bytes_per_ms is not None and spec.balanced is not None
        for group in _GROUPS if "groups" in spec.needs else (1,):
            for bpipe in (False, True) if pairs else (False,):
                with suppress(ScheduleError):  # a size that the schedule does not have
                    wanted = spec.fitted(size._replace(chunks=places.chunks, group_size=group))
                    if wanted.group_size != group or spec.places(wanted) != places:
                        continue
                    name = (
                        spec.name + (f" in groups of {group}" if group > 1 else "") + (" with BPipe" if bpipe else "")
                    )
                    program = build(spec, wanted, bpipe, queues)
                    if bpipe and not any(program.schedule.evictions):
                        continue
                    if halves:
                        rows = tuple(tuple(halved(row, 0)) for row in program.schedule.actions)
                        program = verify(replace(program.schedule, actions=rows), bpipe, queues)
                    yield _weighed(name, program, costs)


def choose(
    costs: RunCosts,
    size: Size,
    queues: Queues = "many",
    halves: bool = False,
    effort: Effort = USUAL,
    of: Spec | None = None,
) -> tuple[Option, list[Option]]:
    """Return the fastest schedule that fits, and all others, also those that do not fit, the fastest first.

    of: as `options` has it. A tie within 2 % goes to the stock order, or else to what saves least. An order is searched
    only if it could be faster than that, and forwards and backwards are not computed together. Raises ScheduleError
    where nothing fits.
    """
    kind = of or find(AUTO)
    known = list(options(costs, size, queues, halves, kind))
    limit_ms = Problem.of(costs, size.stages, size.micro_batches).limit_ms
    best_ms = min((one.batch_ms for one in known if one.fits(costs)), default=math.inf)
    if best_ms > (1 + TIE) * limit_ms and not kind.fused:
        split = "split" in kind.needs
        try:
            program = searched(costs, size.stages, size.micro_batches, effort, split=split, queues=queues).program
            known.append(_weighed("searched", program, costs))
        except ScheduleError:
            if math.isinf(best_ms):
                raise
    known.sort(key=lambda one: one.batch_ms)
    fitting = [one for one in known if one.fits(costs)]
    if not fitting:
        searches = "" if kind.fused else ", not even one that is searched"
        raise ScheduleError(f"no schedule fits{searches}: give more memory")
    near = (one for one in fitting if one.batch_ms <= (1 + TIE) * fitting[0].batch_ms)
    chosen = min(near, key=lambda one: (not one.is_stock, max(one.saved_bytes)))
    return chosen, [one for one in known if one is not chosen]


def _weighed(name: str, program: Program, costs: RunCosts) -> Option:
    """Return the option of a program: its time by simulation, and what its stages hold as it is proven."""
    schedule = program.schedule
    simulated = simulate(program, Costs.of_parts(costs, schedule))
    return Option(name, program, simulated.makespan_ms, tuple(map(max, held_bytes(schedule, costs))))


class ChoiceLoop(SearchLoop):
    """A `SearchLoop` that chooses among schedules, once; each number of micro-batches has its own.

    The two batches before that compute one micro-batch at a time, so that no schedule needs less memory.
    """

    _looks_again: ClassVar[bool] = False

    def __init__(
        self,
        watch: PartWatch,
        log: Callable[[str], None] = lambda line: None,
        effort: Effort = USUAL,
    ) -> None:
        super().__init__(watch, None, log, effort)
        self._halves = False
        self._kind = find(AUTO)

    def allow(self, remedy: str, halves: bool = False, spec: Spec | None = None) -> None:
        """Set the remedy for an error where nothing fits, and what this run can have; call before the first batch.

        halves: layers compute weights' gradients in a second half of the backward, so whole backwards are run as two
        halves. spec: the kind of `auto`.
        """
        self._halves, self._remedy = halves, remedy
        self._kind = spec or find(AUTO)
        self._fused = self._kind.fused

    def _announce(self, size: Size) -> None:
        """Log nothing before the choice."""

    def _first(self, size: Size) -> Schedule:
        return _one_at_a_time(self._places(size), size.micro_batches, "split" in self._kind.needs)

    def _places(self, size: Size) -> Places:
        return self._kind.places(size)

    def _find(self, costs: RunCosts, size: Size, queues: Queues) -> tuple[Schedule, str]:
        chosen, others = choose(costs, size, queues, self._halves, self._effort, self._kind)
        return chosen.program.schedule, self._said(chosen, others, costs, size)

    def _said(self, chosen: Option, others: list[Option], costs: RunCosts, size: Size) -> str:
        following = next((one for one in others if one.fits(costs)), None)
        stock = next((one for one in others if one.is_stock and one is not following), None)
        parts = [
            f"{size.micro_batches} micro-batches: {self._figures(chosen, costs)}, of {_size(self._limit_bytes)}",
            "nothing else fits" if following is None else f"next: {self._figures(following, costs)}",
        ]
        if stock is not None:
            parts.append(f"stock: {self._figures(stock, costs)}")
        if costs.placement == "vee":
            parts.append("stock is not among these, as layers lie in a V")
        return "; ".join(parts)

    def _figures(self, option: Option, costs: RunCosts) -> str:
        stages = len(option.saved_bytes)
        held = [
            self._limit_bytes - cap + saved for cap, saved in zip(costs.caps(stages), option.saved_bytes, strict=True)
        ]
        again = len(option.program.schedule.recomputed)
        return (
            f"{option.name}{f', {again} of {len(costs.parts)} parts computed again' if again else ''}: "
            f"{option.batch_ms:,.1f} ms an iteration, {_size(max(held))} on stage {held.index(max(held))}"
        )


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.1f} MiB"


def _one_at_a_time(places: Places, micro_batches: int, split: bool = True) -> Schedule:
    """Return the schedule in which each micro-batch begins when the one before it is done: none holds less."""
    backward: tuple[Kind, ...] = (INPUT_GRADIENT, WEIGHT_GRADIENT) if split else (BACKWARD,)

    def row(stage: int) -> Iterator[Action]:
        chunks = [place.chunk for place in places.order if place.stage == stage]
        for number in range(micro_batches):
            yield from (Action(FORWARD, number, chunk) for chunk in chunks)
            for chunk in reversed(chunks):
                yield from (Action(kind, number, chunk) for kind in backward)

    rows = tuple(tuple(row(stage)) for stage in range(places.stages))
    return Schedule("one-at-a-time", places.stages, micro_batches, places.chunks, places.chunks, rows, places=places)
