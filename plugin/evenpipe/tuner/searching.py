"""An order for the run's own times: batches are looked at, rank 0 searches, and all ranks train by what it finds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import pstdev
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

import numpy as np

from evenpipe.order_search.costs import FORMAT, Part, Placement, RunCosts, check_caps, held_bytes
from evenpipe.order_search.problem import Problem
from evenpipe.order_search.search import EXPECTED, USUAL, Effort
from evenpipe.runtime.executor import Executor
from evenpipe.runtime.resources import highest_of_all
from evenpipe.runtime.timing import copying_gbps, sending_gbps
from evenpipe.schedule import (
    BACKWARD,
    INPUT_GRADIENT,
    SEARCHED,
    SWAP_OUT,
    WEIGHT_GRADIENT,
    Action,
    Places,
    Program,
    Queues,
    Schedule,
    ScheduleError,
    Size,
    build,
    find,
    loop,
    verify,
)
from evenpipe.schedule.spec import halved
from evenpipe.simulate.searched import searched
from evenpipe.tuner.links import Burst, Ends, decided_by_rank_0, measure_links
from evenpipe.tuner.pace import Pace
from evenpipe.tuner.part_watch import PartFigures, PartWatch
from evenpipe.tuner.process_memory import Room

__all__ = ["FIRST", "UNDER_WAY", "SearchLoop"]

#: The schedule of batches before there is an order, by model chunks a stage: one that saves little.
FIRST: Final[Mapping[int, str]] = MappingProxyType({1: "zb-h1", 2: "v-min"})
#: Messages that a stage receives and sends at once at most, in a V.
UNDER_WAY: Final = 12
_MIB: Final = 2**20


class SearchLoop:
    """One process' part in training by orders that are searched while it trains; all ranks call the same, in step.

    The first batch is weighed, the second one timed, under a schedule of `FIRST`, with weight gradients at once, and
    most micro-batches computed again where a framework can. From the third on, batches follow an order that is searched
    for these times and the memory that there is, with parts computed again where that is faster. Every `interval`
    iterations (None: so many as take an hour) two batches are looked at again, and where stages no longer take the
    times that the order allows for, another one is searched. So is one for batches of another number of micro-batches.

    For each batch, a framework calls `begin` and `prepare`, trains by `program`, and calls `end`. `watch` observes its
    executor. `log` is given a line for each decision.
    """

    #: Whether a decision is only as good as the times that it was made for.
    _looks_again: ClassVar[bool] = True

    def __init__(
        self,
        watch: PartWatch,
        interval: int | None = None,
        log: Callable[[str], None] = lambda line: None,
        effort: Effort = USUAL,
    ) -> None:
        self.costs: RunCosts | None = None
        self._evicts = self._swaps = False
        self._remedy = ""
        self._watch = watch
        self._pace = Pace(interval)
        self._log = log
        self._effort = effort
        self._limit_bytes = 0
        self._look: Literal["weigh", "time"] | None = "weigh"
        self._next = 0
        self._found: dict[int, Schedule] = {}
        self._programs: dict[tuple[Size, Queues], Program] = {}
        self._fused = False

    @property
    def compares(self) -> bool:
        """Return whether the next batch is looked at before there is an order: most of it may be computed again."""
        return self._look is not None and not self._found

    @property
    def weighs(self) -> bool:
        """Return whether the executor is to measure what the next batch saves."""
        return self._look == "weigh"

    def join(self, evicts: bool, swaps: bool = False) -> None:
        """Before a batch: say where orders may move activations, which has those links measured too.

        `evicts`: to partners, which are joined then. `swaps`: to hosts; where an order does, the executor swaps all
        that can leave.
        """
        self._evicts, self._swaps = evicts, swaps

    def begin(self, iteration: int, size: Size) -> None:
        """Before anything of a batch of this size: see whether it is looked at."""
        if self.costs is not None and len(self.costs.parts) != size.stages * size.chunks:
            self._log("what was saved is of another number of parts: searches anew")
            self._forget()
            self._look = "weigh"
        if self._look is None and self._looks_again and iteration >= self._next:
            self._look = "weigh"

    def prepare(self, executor: Executor, size: Size, queues: Queues) -> None:
        """With nothing under way: search an order for a batch of this size, if there is none and times are known.

        Raises ScheduleError, on all ranks, where the memory holds none.
        """
        self._forget_moves()
        if self._look == "weigh":
            self._watch.clear()
            self._watch.store = executor.store
        self._watch.timed = self._look == "time"
        if self.costs is not None and size.micro_batches not in self._found:
            self._announce(size)
            self._found[size.micro_batches] = self._decided(self.costs, size, queues)
            self._programs.clear()
        if executor.swaps is None and any(map(_swaps, self._found.values())):
            executor.swap(1.0)

    def program(self, size: Size, queues: Queues) -> Program:
        """Return what carries out a batch of this size."""
        key, found = (size, queues), self._found.get(size.micro_batches)
        if key not in self._programs:
            schedule = self._first(size) if found is None else found
            self._programs[key] = verify(schedule, any(schedule.evictions), queues, self._fused)
        return self._programs[key]

    def end(self, executor: Executor, iteration: int, size: Size, room: Callable[[], Room]) -> None:
        """After a batch of this size, before `iteration`: take what was seen of it.

        `room` is asked once a batch has been timed.

        Raises ScheduleError, on all ranks, where there is no memory for activations.
        """
        if self._look == "weigh":
            self._look = "time"
        elif self._look == "time":
            self._look = None
            now = self._gathered(executor, size, room())
            self._next = int(highest_of_all([self._pace.next_after(iteration)], executor.device)[0])
            self._pace.begin(iteration)
            reason = None if self.costs is None else self._outdated(self.costs, now, size.stages)
            if self.costs is None or reason is not None:
                self._forget()
                self.costs = now
            if reason is not None:
                self._log(f"iteration {iteration + 1}: {reason}: searches anew")

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a run needs to train by the same orders, as JSON has it; None before there are times.

        It is the same on all ranks.
        """
        if self.costs is None:
            return None
        orders = [str(schedule) for schedule in self._found.values()]
        return {"limit_bytes": self._limit_bytes, "costs": self.costs.model_dump(mode="json"), "orders": orders}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first batch: train by these orders; that batch and the next show whether times are as they were.

        Raises ScheduleError, or ValueError, for what :meth:`state_dict` has not given.
        """
        self.costs, self._limit_bytes = RunCosts.model_validate(state["costs"]), state["limit_bytes"]
        orders = [Schedule.parse(text) for text in state["orders"]]
        self._found = {schedule.micro_batches: schedule for schedule in orders}
        if not self._looks_again:
            self._look = None
        self._programs.clear()

    def _forget_moves(self) -> None:
        """Forget links, and orders that use them, of a run that could and saved them, where this one may not."""
        if self.costs is None:
            return
        if not self._evicts and self.costs.peer_bytes_per_ms is not None:
            self.costs = self.costs.model_copy(update={"peer_bytes_per_ms": None})
            self._found = {count: found for count, found in self._found.items() if not any(found.evictions)}
        if not self._swaps and self.costs.host_bytes_per_ms is not None:
            self.costs = self.costs.model_copy(update={"host_bytes_per_ms": None})
            self._found = {count: found for count, found in self._found.items() if not _swaps(found)}

    def _forget(self) -> None:
        self.costs, self._found = None, {}
        self._programs.clear()

    def _decided(self, costs: RunCosts, size: Size, queues: Queues) -> Schedule:
        """Return the order that rank 0 decides for."""

        def decide() -> tuple[str, str]:
            schedule, said = self._find(costs, size, queues)
            return str(schedule), said

        text, line = decided_by_rank_0(decide)
        self._log(line)
        return Schedule.parse(text)

    def _announce(self, size: Size) -> None:
        self._log(f"searches an order for {size.stages} stages, {size.micro_batches} micro-batches and their times")

    def _first(self, size: Size) -> Schedule:
        """Return the order of batches before there are times."""
        return _at_once(build(FIRST[size.chunks], size).schedule)

    def _places(self, size: Size) -> Places:
        """Return where the parts of the model are."""
        return find(SEARCHED).places(size)

    def _find(self, costs: RunCosts, size: Size, queues: Queues) -> tuple[Schedule, str]:
        """Return, on rank 0, the order for these costs, and what is said of it."""
        began = time.monotonic()
        found = searched(costs, size.stages, size.micro_batches, self._effort, queues=queues)
        return found.program.schedule, _said(found, costs, time.monotonic() - began)

    def _gathered(self, executor: Executor, size: Size, room: Room) -> RunCosts:
        """Return the costs of all parts; of replicas and shards the highest numbers."""
        self._limit_bytes = limit = room.limit_bytes
        stages, stage, device = size.stages, executor.stage_index, executor.device
        places = self._places(size)
        [message_bytes] = highest_of_all([executor.counter.largest_sent], device)
        burst = Burst(1, max(1, int(message_bytes)))
        links_ms = measure_links(Ends(executor.connections, stage, stages, device), [burst])
        [message_ms] = highest_of_all([max((ms for [ms] in links_ms.values()), default=0.0)], device)
        parts = [[0.0] * len(PartFigures._fields) for _ in places.order]
        for chunk, figures in enumerate(self._watch.figures(places.chunks)):
            parts[places.position(stage, chunk)] = [*figures]
        held = highest_of_all([room.static_bytes if at == stage else 0 for at in range(stages)], device)
        known = [None] * len(parts) if self.costs is None else self.costs.parts
        recomputed = self._found[size.micro_batches].recomputed if size.micro_batches in self._found else ()
        caps = [limit - int(nbytes) - UNDER_WAY * int(message_bytes) for nbytes in held]
        found = [
            _part(PartFigures(*row), before, at in recomputed)
            for at, (row, before) in enumerate(zip(highest_of_all(parts, device), known, strict=True))
        ]
        self._check_room(found, places, caps)
        return RunCosts(
            format=FORMAT,
            placement=_placement(places),
            parts=found,
            message_ms=message_ms,
            memory_bytes=caps,
            peer_bytes_per_ms=self._peer_bytes_per_ms(executor),
            host_bytes_per_ms=self._host_bytes_per_ms(executor),
        )

    def _peer_bytes_per_ms(self, executor: Executor) -> float | None:
        """Return how fast the slowest pair sends to each other; None where none may."""
        if not self._evicts:
            return None
        gbps = sending_gbps(executor.connections, executor.stage_index, executor.device)
        [byte_ms] = highest_of_all([0.0 if gbps is None else 1e-6 / gbps], executor.device)
        return 1 / byte_ms if byte_ms else None

    def _host_bytes_per_ms(self, executor: Executor) -> float | None:
        """Return how fast the slowest stage copies to its host, all at once; None where none may."""
        if not self._swaps:
            return None
        [byte_ms] = highest_of_all([1e-6 / copying_gbps(executor.device)], executor.device)
        return float(1 / byte_ms)

    def _check_room(self, parts: Sequence[Part], places: Places, caps: Sequence[int]) -> None:
        """Raise ScheduleError where a stage cannot hold one micro-batch, which is the least of any order."""
        problem = Problem(places, 1, parts, caps)
        least = np.minimum(problem.least_bytes, replace(problem, recomputed=problem.recomputable).least_bytes).tolist()
        needs = [self._limit_bytes - cap + int(nbytes) for cap, nbytes in zip(caps, least, strict=True)]
        stage = max(range(places.stages), key=lambda at: needs[at])
        if needs[stage] > self._limit_bytes:
            raise ScheduleError(
                f"no schedule fits: stage {stage} holds {(needs[stage] - least[stage]) / _MIB:,.1f} MiB of weights, "
                f"gradients, optimizer and messages, and {least[stage] / _MIB:,.1f} MiB for one micro-batch: give at "
                f"least {math.ceil(needs[stage] / 2**30 * 1e4) / 1e4:g} GiB{self._remedy}"
            )

    def _outdated(self, before: RunCosts, now: RunCosts, stages: int) -> str | None:
        """Return why the orders for the costs of `before` are not those of `now`; None where they still are."""
        if before.host_bytes_per_ms is None and now.host_bytes_per_ms is not None:
            return "stages may swap to their hosts now"
        changed = _changed(before, now, stages)
        if changed > EXPECTED.stage:
            return f"times of stages have changed by {changed:.0%} beside each other"
        for schedule in self._found.values():
            try:
                check_caps(schedule, now)
            except ScheduleError:
                return "micro-batches save more, or there is less room for what they save"
        return None


def _placement(places: Places) -> Placement:
    if places.chunks == 1:
        return "straight"
    return "loop" if places == loop(places.stages, places.chunks) else "vee"


def _swaps(schedule: Schedule) -> int:
    """Return how many times stages swap a micro-batch to their hosts."""
    return sum(action.kind == SWAP_OUT for row in schedule.actions for action in row)


def _at_once(schedule: Schedule) -> Schedule:
    """Return the schedule with each weight gradient right behind its input gradient: in less memory."""

    def whole(row: Iterable[Action]) -> Iterator[Action]:
        for action in row:
            if action.kind != WEIGHT_GRADIENT:
                yield Action(BACKWARD, *action.unit) if action.kind == INPUT_GRADIENT else action

    return replace(schedule, actions=tuple(tuple(halved(whole(row), 0)) for row in schedule.actions))


def _part(figures: PartFigures, before: Part | None, recomputed: bool) -> Part:
    """Return a part's costs, beside what it cost `before`: `recomputed`, where all units that were timed are."""
    input_gradient_ms = figures.input_gradient_ms
    saved, left, again = figures.saved_bytes, figures.left_bytes, figures.recomputed_bytes
    again_ms: float | None = figures.recompute_ms
    if before is not None and recomputed:
        input_gradient_ms *= before.input_gradient_ms / (before.recomputed().input_gradient_ms or 1.0)
    if before is not None and not saved:  # all units that were weighed are computed again
        before_left = before.saved_bytes - before.freed_by_input_gradient_bytes
        saved = int(before.saved_bytes * left / before_left) if before_left else before.saved_bytes
    if before is not None:
        again, again_ms = again or before.recomputed_bytes or 0, again_ms or before.recompute_ms
    return Part(
        forward_ms=figures.forward_ms,
        input_gradient_ms=input_gradient_ms,
        weight_gradient_ms=figures.weight_gradient_ms,
        saved_bytes=int(saved),
        freed_by_input_gradient_bytes=int(saved - left),
        staying_bytes=min(int(saved), int(figures.staying_bytes)),
        recomputed_bytes=int(again) if 0 < again < saved else None,
        recompute_ms=again_ms or None if 0 < again < saved else None,  # noise may hide it: a forward's time then
    )


def _changed(before: RunCosts, now: RunCosts, stages: int) -> float:
    """Return how much the times of stages have changed beside each other: the standard deviation, of the slowest's."""
    old, new = _stages_ms(before, stages), _stages_ms(now, stages)
    scale = sum(new) / sum(old)
    return pstdev([b / scale - a for a, b in zip(old, new, strict=True)]) / max(old)


def _stages_ms(costs: RunCosts, stages: int) -> list[float]:
    total = [0.0] * stages
    for place, part in zip(costs.places(stages).order, costs.parts, strict=True):
        total[place.stage] += part.forward_ms + part.input_gradient_ms + part.weight_gradient_ms
    return total


def _said(found: Any, costs: RunCosts, seconds: float) -> str:
    schedule = found.program.schedule
    peaks = [max(held, default=0) for held in held_bytes(schedule, costs)]
    fullest = max(range(schedule.stages), key=lambda stage: peaks[stage] / max(1, costs.caps(schedule.stages)[stage]))
    room = costs.caps(schedule.stages)[fullest]
    faster = f"{found.published_ms / found.batch_ms:.3f} × the speed of what is published and fits"
    return (
        f"{schedule.micro_batches} micro-batches: an order found in {seconds:.1f} s; by simulation a batch takes "
        f"{found.batch_ms:,.1f} ms, {'nothing published fits' if math.isinf(found.published_ms) else faster}; stage "
        f"{fullest} saves at most {peaks[fullest] / _MIB:,.1f} of {room / _MIB:,.1f} MiB"
        + (
            f"; {len(schedule.recomputed)} of {len(costs.parts)} parts are computed again"
            if schedule.recomputed
            else ""
        )
        + (f"; stages evict {sum(schedule.evictions)} times to partners" if any(schedule.evictions) else "")
        + (f"; stages swap {count} times to their hosts" if (count := _swaps(schedule)) else "")
    )
