"""Costs that the schedules of a shape share: layouts, parts on their nodes, bounds of bytes and of a batch's end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import fmean
from typing import Final, NamedTuple

from evenpipe.planner.iteration import HandOver, message_bytes_of
from evenpipe.planner.kernels import FITTED
from evenpipe.planner.run import Run
from evenpipe.planner.search.balanced_layout import Layout
from evenpipe.planner.search.bounds import least_bytes, least_end_ms, unlike
from evenpipe.planner.search.profiles import PartCost, Profile
from evenpipe.planner.search.question import Question
from evenpipe.planner.stage_bytes import Chunk, States, bytes_of_stage, stage_states
from evenpipe.planner.stage_nodes import Placed, Positions

__all__ = ["Held", "Shape", "ShapeCosts"]

_Layout = Layout | None
_MOST_PASSES: Final = 4


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

    def _balanced(self, where: Positions, bpipe: bool, most: tuple[int, ...] | None = None) -> Layout:
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
        own, stays = self._held(parts, where, stage, held, tried)
        split, device = "split" in tried.spec.needs, self._nodes.device(groups)
        least = least_bytes(own, stays, held.live[stage], split, tried, self._message_bytes, device)
        return least + self._nodes.lacking(groups)

    def _held(
        self, parts: Sequence[PartCost], where: Positions, stage: int, held: Held, tried: Run
    ) -> tuple[list[Chunk], States]:
        """Return the stage's chunks, and what stays on its device."""
        key = id(parts), stage, held.versions
        found = self._states.get(key)
        if found is None:
            own = [parts[n].chunk for n in where.at[stage]]
            device = self._nodes.device(self._placed(tried.bpipe).groups[stage])
            found = own, stage_states(own, self._shape.run, held.versions, device.transposing)
            if id(parts) in self._unlike:
                self._states[key] = found
        return found

    def lighter(
        self, layout: _Layout, where: Positions, held: Held, tried: Run
    ) -> tuple[_Layout, Sequence[PartCost]] | None:
        """Return a layout whose stages on smaller devices have as many layers as fit there, and its parts.

        None where nodes are alike, or where the layout stays the same.
        """
        if self._nodes.alike or layout is None:
            return None
        found = layout
        for _ in range(_MOST_PASSES):  # one is enough with one chunk a stage, whose bytes are linear in its layers
            most = self._most_layers(found, where, held, tried)
            if most is None:
                break
            found = self._balanced(where, tried.bpipe, most)
        return (found, self._parts(where, tried.bpipe, found)) if found != layout else None

    def _most_layers(self, layout: Layout, where: Positions, held: Held, tried: Run) -> tuple[int, ...] | None:
        """Return how many layers of each stage fit on its device; None where all that it has do.

        Live units are counted as the mean of the stage's chunks.
        """
        fewer = layout._replace(layers=tuple(max(0, count - 1) for count in layout.layers))
        now, less = (self._parts(where, tried.bpipe, one) for one in (layout, fewer))
        most, full = [], False
        for stage, at in enumerate(where.at):
            groups = self._placed(tried.bpipe).groups[stage]
            device, have = self._nodes.device(groups), self._have - self._nodes.lacking(groups)
            nbytes, lower = (
                bytes_of_stage(
                    own,
                    stays,
                    round(held.live[stage] * fmean(chunk.kept_bytes for chunk in own)),
                    tried,
                    self._message_bytes,
                    device,
                ).total
                for own, stays in (self._held(parts, where, stage, held, tried) for parts in (now, less))
            )
            count = sum(layout.layers[n] for n in at)
            each = (nbytes - lower) / max(1, count - sum(fewer.layers[n] for n in at))
            most.append(count if each <= 0 else max(0, count + math.floor((have - nbytes) / each)))
            full = full or most[-1] < count
        return tuple(most) if full else None

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
