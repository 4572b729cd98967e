"""One plan for what stages save under a cap: kept, recomputed, swapped to the host or sent to the partner."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

from evenpipe.schedule import (
    LEVELS,
    Action,
    Level,
    LevelsOfStages,
    Link,
    Program,
    Programs,
    ScheduleError,
    Size,
    partner,
    swapping_at,
)
from evenpipe.schedule.swap_room import Saved, SwapRoom
from evenpipe.simulate.costs import Costs, Wire
from evenpipe.simulate.simulator import simulate

__all__ = ["CappedStage", "Layer", "Plan", "Way", "costs_of", "planned", "ways_of"]

#: Micro-batches for each stage by which ways are compared, and seconds in which one stage after another is changed.
_COMPARED: Final = 4
_SECONDS: Final = 5.0
_LEAST_GAIN_MS: Final = 1e-9


class Layer(NamedTuple):
    """A layer that can be recomputed: the bytes that this frees of a micro-batch, and the time that it takes."""

    freed_bytes: float
    forward_ms: float


class Way(NamedTuple):
    """A stage's part of a plan: the level and share of its swaps, and how many layers it recomputes."""

    level: Level
    share: float
    layers: int


_Ways: TypeAlias = tuple[Way, ...]


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
    """Each stage's way, whether stages send to partners, and the milliseconds of a batch by simulation."""

    ways: _Ways
    batch_ms: float
    program: Program
    bpipe: bool = False


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
            sent = Wire(transmit_ms=max(one.nbytes for one in again.saved.values()) * stage.partner_ms_a_byte)
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
    of the plans that are compared. From the fastest one on, the way of one stage after another is changed.
    """
    own = Programs(plain.spec, queues=plain.queues)  # of many levels, none of which is kept
    ways = [ways_of(row, stage) for row, stage in zip(own(size).schedule.actions, stages, strict=True)]
    plans = list[Plan]()
    if all(ways):
        fewer = _COMPARED * size.stages
        few = size if size.group_size > 1 or size.micro_batches <= fewer else size._replace(micro_batches=fewer)
        compared = _Compared(own, few, stages)
        beginnings = set(_beginnings(ways, stages))
        beginnings.add(compared.changed(min(beginnings, key=compared), ways))
        whole = _Compared(own, size, stages)
        plans += [Plan(each, whole(each)[0], whole.program(each)) for each in sorted(beginnings)]
    plans += _partners_plans(plain, size, stages)
    return min(plans, key=lambda plan: plan.batch_ms, default=None)


class _Compared:
    """The milliseconds of a batch by ways, and of what stages do for the cap, added up, where these are the same."""

    def __init__(self, programs: Programs, size: Size, stages: Sequence[CappedStage]) -> None:
        self._programs, self._size, self._stages = programs, size, stages
        self._known: dict[_Ways, tuple[float, float]] = {}

    def __call__(self, ways: _Ways) -> tuple[float, float]:
        if ways not in self._known:
            batch_ms = simulate(self.program(ways), costs_of(self._stages, ways)).makespan_ms
            extra_ms = sum(_extra_ms(stage, way) for stage, way in zip(self._stages, ways, strict=True))
            self._known[ways] = round(batch_ms / _LEAST_GAIN_MS) * _LEAST_GAIN_MS, extra_ms
        return self._known[ways]

    def program(self, ways: _Ways) -> Program:
        """Return the verified program of these ways."""
        return self._programs.swapping(LevelsOfStages(tuple(way.level for way in ways)))(self._size)

    def changed(self, ways: _Ways, able: Sequence[Sequence[Way]]) -> _Ways:
        """Return faster ones: each stage in turn goes another way, as long as one is found that is faster."""
        until, found, improved = time.monotonic() + _SECONDS, ways, True
        while improved:
            improved = False
            for stage, of_stage in enumerate(able):
                for way in of_stage:
                    other = (*found[:stage], way, *found[stage + 1 :])
                    if time.monotonic() > until:
                        return found
                    if self(other) < self(found):
                        found, improved = other, True
        return found


def _beginnings(ways: Sequence[Sequence[Way]], stages: Sequence[CappedStage]) -> Iterator[_Ways]:
    """Yield swaps with as few layers as can be, recomputation with as few swaps, and what costs each stage least."""
    yield tuple(min(of_stage, key=lambda way: (way.layers, LEVELS.index(way.level))) for of_stage in ways)
    yield tuple(min(of_stage, key=lambda way: (LEVELS.index(way.level), way.layers)) for of_stage in ways)
    yield tuple(
        min(of_stage, key=lambda way: _extra_ms(stage, way)) for of_stage, stage in zip(ways, stages, strict=True)
    )


def _extra_ms(stage: CappedStage, way: Way) -> float:
    """Return what a way costs a micro-batch at least: recomputation, and copies that no forward of its chunk hides."""
    again = stage.recomputing(way.layers)
    copy_ms = again.leaving_bytes(way.share) * stage.host_ms_a_byte
    waits_ms = 2 * copy_ms if way.level == "late" else max(0.0, copy_ms - min(stage.forward_ms))
    return sum(again.backward_ms) - sum(stage.backward_ms) + waits_ms * (way.level != "none")


def _partners_plans(plain: Programs, size: Size, stages: Sequence[CappedStage]) -> Iterator[Plan]:
    """Yield BPipe with the fewest layers recomputed on all stages that keeps to the caps, if stages can send so."""
    if plain.spec.balanced is None or any(stage.partner_ms_a_byte is None for stage in stages):
        return
    with suppress(ScheduleError):
        program = Programs(plain.spec, True, plain.queues)(size)
        for layers in range(1 + max(stage.most_layers for stage in stages)):
            ways = tuple(Way("none", 0.0, min(layers, stage.most_layers)) for stage in stages)
            again = [stage.recomputing(way.layers) for stage, way in zip(stages, ways, strict=True)]
            held = [[round(stage.saved[chunk].nbytes) for chunk in range(size.chunks)] for stage in again]
            found = simulate(program, costs_of(stages, ways), held)
            once = [sum(saved.once for saved in stage.saved.values()) for stage in again]
            if all(
                one.peak_bytes + more <= stage.limit_bytes
                for one, more, stage in zip(found.stages, once, again, strict=True)
            ):
                yield Plan(ways, found.makespan_ms, program, bpipe=True)
                return
