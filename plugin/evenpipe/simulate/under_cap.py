"""One plan for what stages save under a cap: kept, recomputed, swapped to the host or sent to the partner."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

from evenpipe.order_search.costs import Part, held_on
from evenpipe.schedule import (
    LEVELS,
    Action,
    Level,
    LevelsOfStages,
    Link,
    Program,
    Programs,
    Schedule,
    ScheduleError,
    Size,
    balance,
    loop,
    partner,
    swapping_at,
    verify,
    with_swaps,
)
from evenpipe.schedule.swap_room import Saved, SwapRoom
from evenpipe.simulate.costs import Costs, Wire
from evenpipe.simulate.simulator import simulate

__all__ = ["CappedStage", "Layer", "Plan", "Way", "costs_of", "planned", "program_of", "traded_peak_bytes", "ways_of"]

#: Micro-batches for each stage by which ways are compared, and seconds in which one stage after another is changed.
_COMPARED: Final = 4
_SECONDS: Final = 5.0
_LEAST_GAIN_MS: Final = 1e-9


class Layer(NamedTuple):
    """A layer that can be recomputed: the bytes that this frees of a micro-batch, and the time that it takes."""

    freed_bytes: float
    forward_ms: float


class Way(NamedTuple):
    """A stage's part of a plan: the level and share of its swaps, and how many layers it recomputes.

    bound: where it and its partner move micro-batches as under BPipe, the most that it holds, its partner's too; else
    0. Such a stage swaps nothing.
    """

    level: Level
    share: float
    layers: int
    bound: int = 0


_NOTHING: Final = Way("none", 0.0, 0)
_Ways: TypeAlias = tuple[Way, ...]
#: What some stages do, by stage.
_Move: TypeAlias = Mapping[int, Way]


@dataclass(frozen=True)
class CappedStage:
    """What a stage may hold of its micro-batches, and what one of them saves and takes.

    limit_bytes: for all that its micro-batches save. saved, forward_ms, backward_ms: by model chunk. layers: by chunk,
    those that can be recomputed, from the first on. host_ms_a_byte, partner_ms_a_byte: of a copy, one way; None where
    there is no partner to send to.
    """

    limit_bytes: float
    saved: Mapping[int, Saved]
    layers: Sequence[Sequence[Layer]]
    forward_ms: Sequence[float]
    backward_ms: Sequence[float]
    host_ms_a_byte: float = 0.0
    partner_ms_a_byte: float | None = None

    @cached_property
    def most_layers(self) -> int:
        """Return how many layers of a chunk can be recomputed."""
        return max(map(len, self.layers), default=0)

    def recomputing(self, layers: int) -> CappedStage:
        """Return the stage whose chunks recompute their first `layers`: what it saves, may hold and takes then.

        The layer that is being recomputed is whole beside all that is saved, but for kept layers, which come after it,
        and whose backward is over by then.
        """
        if not layers:
            return self
        saved, working = dict(self.saved), 0.0
        backward_ms = list(self.backward_ms)
        for chunk, of_chunk in enumerate(self.layers):
            again = of_chunk[:layers]
            freed = sum(layer.freed_bytes for layer in again)
            whole = self.saved[chunk]
            left = max(0.0, whole.nbytes - freed)
            saved[chunk] = Saved(left, min(whole.staying, left), max(0.0, whole.first - freed))
            backward_ms[chunk] += sum(layer.forward_ms for layer in again)
            kept = sum(layer.freed_bytes for layer in of_chunk[layers:])
            working = max(working, max((layer.freed_bytes for layer in again), default=0.0) - kept)
        return replace(self, limit_bytes=self.limit_bytes - working, saved=saved, layers=(), backward_ms=backward_ms)

    def leaving_bytes(self, share: float) -> float:
        """Return the most that leaves of a micro-batch of which this share is to."""
        return max(saved.nbytes - saved.left(share) for saved in self.saved.values())


@dataclass(frozen=True)
class Plan:
    """Each stage's way, and the milliseconds of a batch by simulation."""

    ways: _Ways
    batch_ms: float
    program: Program

    @property
    def bpipe(self) -> bool:
        """Return whether stages send to partners."""
        return any(way.bound for way in self.ways)


def program_of(plain: Programs, size: Size, ways: _Ways) -> Program:
    """Return the verified program of stages that go these ways. Raises ScheduleError for a bound that cannot be."""
    levels = LevelsOfStages(tuple(way.level for way in ways))
    if not any(way.bound for way in ways):
        return plain.swapping(levels)(size)
    schedule = plain(size).schedule
    bounds = [way.bound or own for way, own in zip(ways, schedule.peak_live, strict=True)]
    return verify(with_swaps(balance(schedule, bounds, plain.queues), levels), True, plain.queues)


def ways_of(row: tuple[Action, ...], stage: CappedStage) -> list[Way]:
    """Return the ways in which a stage with these actions keeps to its cap.

    For each level of swaps and number of layers that recompute, the smallest share that leaves. A number is left out
    where fewer layers do without swaps.
    """
    found: list[Way] = []
    for level in LEVELS:
        room = SwapRoom(swapping_at(level, row))
        for layers in range(stage.most_layers + 1):
            again = stage.recomputing(layers)
            share = room.least_share(again.saved, again.limit_bytes)
            if share is not None and (share or Way("none", 0.0, layers) not in found):
                found.append(Way(level if share else "none", share, layers))
            if share == 0:
                break
    return found


def costs_of(stages: Sequence[CappedStage], ways: _Ways) -> Costs:
    """Return what a batch costs whose stages go these ways. Half of a backward, without recomputation, is weights'."""
    parts, links = list[tuple[tuple[float, float, float], ...]](), dict[Link, Wire]()
    for number, (stage, way) in enumerate(zip(stages, ways, strict=True)):
        again = stage.recomputing(way.layers)
        each = zip(stage.forward_ms, again.backward_ms, stage.backward_ms, strict=True)
        parts.append(tuple((forward, backward - whole / 2, whole / 2) for forward, backward, whole in each))
        copied = Wire(transmit_ms=again.leaving_bytes(way.share) * stage.host_ms_a_byte) if way.share else Wire()
        links |= {Link("swap out", number, number): copied, Link("swap in", number, number): copied}
        other = partner(number, len(stages))
        if stage.partner_ms_a_byte is not None and other > number:
            sent = Wire(transmit_ms=again.leaving_bytes(1.0) * stage.partner_ms_a_byte)
            links |= {Link("evict", number, other): sent, Link("load", other, number): sent}
    each_ms = [[sum(part[at] for part in row) for row in parts] for at in range(3)]
    backward_ms = (inputs + weights for inputs, weights in zip(each_ms[1], each_ms[2], strict=True))
    return Costs(
        tuple(each_ms[0]),
        tuple(backward_ms),
        links=links,
        awaited_swaps=True,
        weight_gradient_ms=tuple(each_ms[2]),
        parts_ms=tuple(parts),
    )


def planned(plain: Programs, size: Size, stages: Sequence[CappedStage]) -> Plan | None:
    """Return the fastest plan that is found; None where a stage has no way to keep to its cap.

    plain: without swaps and BPipe. By simulation the plan is no slower than swaps alone, recomputation alone and, where
    stages can send to partners, BPipe, wherever these keep to the cap: each of them, with the least that does, is one
    of the plans that are compared. From the fastest one on, the way of one stage, or of a pair, after another is
    changed.
    """
    own = Programs(plain.spec, queues=plain.queues)  # of many levels, none of which is kept
    alone = [ways_of(row, stage) for row, stage in zip(own(size).schedule.actions, stages, strict=True)]
    fewer = _COMPARED * size.stages
    only = size.group_size > 1 or plain.spec.table is not None  # a table is of its own size
    few = size if only or size.micro_batches <= fewer else size._replace(micro_batches=fewer)
    steady = own(few).schedule.peak_live == own(size).schedule.peak_live
    pairs = [*_pairs_ways(own(few).schedule, plain, stages)] if steady else []
    beginnings = {*_beginnings(alone, pairs, stages)}
    if not beginnings:
        return None
    compared = _Compared(own, few, stages)
    each_alone = ({stage: way} for stage, ways in enumerate(alone) for way in ways)
    beginnings.add(compared.changed(min(beginnings, key=compared), [*each_alone, *pairs], alone))
    whole = _Compared(own, size, stages)
    able = [ways for ways in sorted(beginnings) if math.isfinite(whole(ways)[0])]
    plans = (Plan(ways, whole(ways)[0], whole.program(ways)) for ways in able)
    return min(plans, key=lambda plan: plan.batch_ms, default=None)


class _Compared:
    """The milliseconds of a batch by ways, and of what stages do for the cap, added up, where these are the same."""

    def __init__(self, programs: Programs, size: Size, stages: Sequence[CappedStage]) -> None:
        self._programs, self._size, self._stages = programs, size, stages
        self._known: dict[_Ways, tuple[float, float]] = {}

    def __call__(self, ways: _Ways) -> tuple[float, float]:
        if ways not in self._known:
            try:
                batch_ms = simulate(self.program(ways), costs_of(self._stages, ways)).makespan_ms
            except ScheduleError:  # bounds that moves between partners cannot keep
                self._known[ways] = math.inf, math.inf
                return self._known[ways]
            extra_ms = sum(_extra_ms(stage, way) for stage, way in zip(self._stages, ways, strict=True))
            self._known[ways] = round(batch_ms / _LEAST_GAIN_MS) * _LEAST_GAIN_MS, extra_ms
        return self._known[ways]

    def program(self, ways: _Ways) -> Program:
        """Return the verified program of these ways."""
        return program_of(self._programs, self._size, ways)

    def changed(self, ways: _Ways, moves: Sequence[_Move], alone: Sequence[Sequence[Way]]) -> _Ways:
        """Return faster ones: a stage or pair in turn goes another way, as long as one is found that is faster."""
        until, found, improved = time.monotonic() + _SECONDS, ways, True
        while improved:
            improved = False
            for move in moves:
                if time.monotonic() > until:
                    return found
                other = _moved(found, move, alone, self._stages)
                if other is not None and self(other) < self(found):
                    found, improved = other, True
        return found


def _moved(ways: _Ways, move: _Move, alone: Sequence[Sequence[Way]], stages: Sequence[CappedStage]) -> _Ways | None:
    """Return the ways after a move; a partner that is left goes its cheapest way alone: None where it has none."""
    after = {**dict(enumerate(ways)), **move}
    for stage in move:
        other = partner(stage, len(ways))
        if other != stage and other not in move and after[other].bound:
            if not alone[other]:
                return None
            after[other] = _cheapest(alone[other], stages[other])
    return tuple(after.values())


def _cheapest(ways: Iterable[Way], stage: CappedStage) -> Way:
    return min(ways, key=lambda way: _extra_ms(stage, way))


def _beginnings(
    alone: Sequence[Sequence[Way]], pairs: Sequence[_Move], stages: Sequence[CappedStage]
) -> Iterator[_Ways]:
    """Yield swaps with as few layers as can be, recomputation with as few swaps, and what costs each stage least.

    And, where pairs can move micro-batches, that of all that would do something else, with as few layers as can be.
    """
    if all(alone):
        yield tuple(min(ways, key=lambda way: (way.layers, LEVELS.index(way.level))) for ways in alone)
        yield tuple(min(ways, key=lambda way: (LEVELS.index(way.level), way.layers)) for ways in alone)
        yield tuple(_cheapest(ways, stage) for ways, stage in zip(alone, stages, strict=True))
    ways = {
        number: min(ways, key=lambda way: (LEVELS.index(way.level), way.layers))
        for number, ways in enumerate(alone)
        if ways
    }
    free = [number for number, way in ways.items() if way == _NOTHING]
    for move in sorted(pairs, key=lambda move: -sum(way.layers for way in move.values())):  # the last one stays
        if not all(number in free for number in move):
            ways |= move
    if pairs and len(ways) == len(stages):
        yield tuple(ways[number] for number in range(len(stages)))


def _extra_ms(stage: CappedStage, way: Way) -> float:
    """Return what a way costs a micro-batch at least: recomputation, and copies that no forward of its chunk hides."""
    again = stage.recomputing(way.layers)
    copy_ms = again.leaving_bytes(way.share) * stage.host_ms_a_byte
    waits_ms = 2 * copy_ms if way.level == "late" else max(0.0, copy_ms - min(stage.forward_ms))
    return sum(again.backward_ms) - sum(stage.backward_ms) + waits_ms * (way.level != "none")


def _pairs_ways(schedule: Schedule, plain: Programs, stages: Sequence[CappedStage]) -> Iterator[_Move]:
    """Yield what both stages of a pair do where one sends to the other, from the fewest micro-batches on.

    They recompute as few layers as keep both under their caps; those that recompute as many as with fewer sent are left
    out. Bytes are those that `held_on` proves.
    """
    own, count = schedule.peak_live, schedule.stages
    if schedule.places != loop(count, schedule.chunks) or plain.spec.fused:
        return
    for stage in range(count // 2):
        other, seen = partner(stage, count), set[tuple[int, ...]]()
        for sent in range(1, own[stage] - 1) if stages[stage].partner_ms_a_byte is not None else ():
            # What comes in counts beside what it makes room for.
            bounds = {stage: own[stage] - sent, other: own[other] + sent + 1}
            with suppress(ScheduleError):
                trading = balance(schedule, [bounds.get(at, own[at]) for at in range(count)], plain.queues)
                layers: dict[int, int] = {}
                for at in (stage, other):
                    least = _least_layers(at, trading, stages, layers)
                    if least is None:
                        break
                    layers[at] = least
                again = tuple(layers.values())
                if len(layers) == 2 and again not in seen:
                    seen.add(again)
                    yield {at: Way("none", 0.0, layers[at], bounds[at]) for at in (stage, other)}


def _least_layers(
    stage: int, schedule: Schedule, stages: Sequence[CappedStage], layers: Mapping[int, int]
) -> int | None:
    """Return how few layers of a stage have to be recomputed beside `layers` of others; None where all are too few."""
    for least in range(stages[stage].most_layers + 1):
        again = [one.recomputing({**layers, stage: least}.get(number, 0)) for number, one in enumerate(stages)]
        if traded_peak_bytes(stage, schedule, [one.saved for one in again]) <= again[stage].limit_bytes:
            return least
    return None


def traded_peak_bytes(stage: int, schedule: Schedule, saved: Sequence[Mapping[int, Saved]]) -> float:
    """Return the most bytes of micro-batches on a stage that moves some; `saved` is by stage, as layers recompute."""
    parts = [_part(saved[place.stage][place.chunk]) for place in schedule.places.order]
    return max(held_on(stage, schedule, parts)) + sum(of_chunk.once for of_chunk in saved[stage].values())


def _part(saved: Saved) -> Part:
    """Return the bytes of a part; its times do not matter."""
    nbytes, staying = math.ceil(saved.nbytes), math.ceil(saved.staying)
    return Part(forward_ms=0, input_gradient_ms=0, weight_gradient_ms=0, saved_bytes=nbytes, staying_bytes=staying)
