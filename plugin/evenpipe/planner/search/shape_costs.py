"""Costs that the schedules of a shape share: layouts, parts on their nodes, bounds of bytes and of a batch's end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from evenpipe.planner.estimate import Positions
from evenpipe.planner.iteration import HandOver, message_bytes_of
from evenpipe.planner.kernels import FITTED
from evenpipe.planner.run import Run
from evenpipe.planner.search.bounds import PartCost, Profile, least_bytes, least_end_ms, unlike
from evenpipe.planner.search.question import Question
from evenpipe.planner.stage_bytes import Chunk, States, stage_states
from evenpipe.planner.stage_nodes import Placed

__all__ = ["Held", "Shape", "ShapeCosts"]

_Layout = tuple[int, ...] | None


class Shape(NamedTuple):
    """How model and batch are divided; ``run`` has no schedule and no layout yet.

    ``nbytes``: the least that its fullest stage needs. ``even``: all parts have the same number of layers; otherwise
    stages are balanced.
    """

    run: Run
    profile: Profile
    nbytes: int
    even: bool = True


class Held(NamedTuple):
    """The live units of each stage (a lower bound) and the weight versions of a schedule."""

    live: Sequence[int]
    versions: int


class ShapeCosts:
    """Costs of one shape, each found once.

    Positions are compared by identity: `positions_of` makes equal ones once. BPipe may place stages on other nodes,
    where nodes are unlike.
    """

    def __init__(self, question: Question, shape: Shape) -> None:
        self._question, self._shape, self._nodes = question, shape, question.nodes
        self._have = question.cluster.device.memory_gib * 2**30
        self._message_bytes = message_bytes_of(question.model, shape.run)
        self._laid_out: dict[tuple[int, bool], tuple[_Layout, Sequence[PartCost]]] = {}
        self._unlike: dict[int, tuple[Sequence[PartCost], Sequence[int]]] = {}
        self._ends: dict[tuple[int, bool, bool | None], float] = {}
        self._over: dict[tuple[int, bool, bool], HandOver] = {}
        self._states: dict[tuple[int, int, int], tuple[list[Chunk], States]] = {}
        self._placed = cache(lambda bpipe: Placed(shape.run.but(bpipe=bpipe), question.nodes, FITTED))

    def laid_out(self, where: Positions, bpipe: bool) -> tuple[_Layout, Sequence[PartCost]]:
        """Return the layout, None if it is even, and its parts."""
        key = id(where), bpipe and not self._nodes.alike
        if key not in self._laid_out:
            layout = None if self._shape.even else self._balanced(where, bpipe)
            self._laid_out[key] = layout, self._parts(where, bpipe, layout)
        return self._laid_out[key]

    def _balanced(self, where: Positions, bpipe: bool, most: tuple[int, ...] | None = None) -> tuple[int, ...]:
        on = None if self._nodes.alike else tuple(self._placed(bpipe).groups)
        return self._shape.profile.balanced(tuple(where.stages), on, most)

    def _parts(self, where: Positions, bpipe: bool, layout: _Layout) -> Sequence[PartCost]:
        run, groups = self._shape.run, None if self._nodes.alike else self._placed(bpipe).groups
        on = groups and [groups[stage] for stage in where.stages]
        return self._shape.profile.parts(run.stages, run.chunks, layout, on)

    def least_bytes(self, parts: Sequence[PartCost], where: Positions, held: Held, tried: Run) -> Sequence[int]:
        """Return a lower bound of each unlike stage's bytes, up to the first that is too large.

        What a stage's device has less than the largest counts as full.
        """
        if id(parts) not in self._unlike:  # which keeps the parts, so that no others have the id
            self._unlike[id(parts)] = parts, unlike(parts, where)
        found: list[int] = []
        for stage in self._unlike[id(parts)][1]:
            found.append(self._least_bytes(parts, where, stage, held, tried))
            if found[-1] > self._have:
                break
        return found

    def _least_bytes(self, parts: Sequence[PartCost], where: Positions, stage: int, held: Held, tried: Run) -> int:
        groups = self._placed(tried.bpipe).groups[stage]
        device, split = self._nodes.device(groups), "split" in tried.spec.needs
        key = id(parts), stage, held.versions
        found = self._states.get(key)
        if found is None:
            own = [parts[n].chunk for n in where.at[stage]]
            found = own, stage_states(own, self._shape.run, held.versions, device.transposing)
            if id(parts) in self._unlike:
                self._states[key] = found
        least = least_bytes(*found, held.live[stage], split, tried, self._message_bytes, device)
        return least + self._nodes.lacking(groups)

    def lighter(
        self, layout: _Layout, where: Positions, held: Held, tried: Run
    ) -> tuple[_Layout, Sequence[PartCost]] | None:
        """Return a layout whose stages on smaller devices have as many layers as fit there, and its parts.

        None where nodes are alike, where stages have several chunks, or where the layout stays the same.
        """
        if self._nodes.alike or layout is None or tried.chunks > 1:
            return None
        fewer = tuple(max(0, count - 1) for count in layout)
        now, less = (self._parts(where, tried.bpipe, one) for one in (layout, fewer))
        most = []
        for stage, count in enumerate(layout):
            nbytes = self._least_bytes(now, where, stage, held, tried)
            each = nbytes - self._least_bytes(less, where, stage, held, tried)
            most.append(count if each <= 0 else max(0, count + math.floor((self._have - nbytes) / each)))
        found = self._balanced(where, tried.bpipe, tuple(most))
        return (found, self._parts(where, tried.bpipe, found)) if found != layout else None

    def end_ms(self, parts: Sequence[PartCost], where: Positions, tried: Run) -> float:
        """Return a lower bound of a batch's end; a lighter layout's parts have their own."""
        key = id(parts), tried.bpipe, tried.overlap_parameters
        if key not in self._ends:
            self._ends[key] = least_end_ms(parts, where, tried, self._placed(tried.bpipe))
        return self._ends[key]

    def hand_over(self, where: Positions, tried: Run) -> HandOver:
        """Return the fastest hand-over."""
        key = id(where) * (not self._nodes.alike), tried.bpipe, tried.spec.name in (tried.blocking or ())
        if key not in self._over:
            self._over[key] = self._placed(tried.bpipe).fastest_hand_over(self._question.model, tried, where.stages)
        return self._over[key]
