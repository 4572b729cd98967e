"""A schedule whose micro-batches run in groups of a size that is to be chosen, as planner and tuner know it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from evenpipe.schedule import Program, Size, build
from evenpipe.simulate import Costs, simulate

__all__ = ["Candidate", "GroupedSchedule", "k_forward_k_backward"]


class Candidate(NamedTuple):
    """Groups of ``k`` micro-batches of ``b`` samples, of which a replica's batch has ``m``."""

    k: int
    b: int
    m: int

    @property
    def name(self) -> str:
        """Such as k2b4."""
        return f"k{self.k}b{self.b}"


class GroupedSchedule(NamedTuple):
    """Programs for p ``stages``: ``programs(k, m)`` runs a batch of m micro-batches in groups of k.

    A batch of ``settled(k, m)`` micro-batches, m at most, has the stages peak as one of m does. ``live(k, m)``: per
    stage, the most micro-batches that it holds at once, where that is known without a program, and all are its own.
    """

    name: str
    stages: int
    bpipe: bool
    programs: Callable[[int, int], Program]
    settled: Callable[[int, int], int] = lambda k, m: m
    live: Callable[[int, int], Sequence[int]] | None = None

    def saved_bytes(self, units: Sequence[int], candidate: Candidate) -> tuple[int, ...]:
        """Per stage, the peak of own plus accepted saved activations; ``units[s]``: those of a micro-batch of stage s.

        Times do not matter, since transfers are waited for by the schedule's bound.
        """
        k, _, m = candidate
        if self.live is not None:
            return tuple(held * unit for held, unit in zip(self.live(k, m), units, strict=True))
        costs = Costs((1.0,) * self.stages, (2.0,) * self.stages)
        simulation = simulate(self.programs(k, self.settled(k, m)), costs, [(unit,) for unit in units])
        return tuple(stage.peak_bytes for stage in simulation.stages)


def k_forward_k_backward(stages: int, bpipe: bool = False) -> GroupedSchedule:
    """Ada-Grouper's kFkB, with or without BPipe: stage s holds min(k(p − s), m) micro-batches of its own."""

    def settled(k: int, m: int) -> int:
        """Those of three 1F1B warm-ups and of the last group.

        By then evictions have settled into a pattern that longer batches only repeat; a smaller last group changes it.
        """
        enough = k * (3 * stages + 2)
        return m if m <= enough else enough + (m - enough) % k

    def live(k: int, m: int) -> list[int]:
        return [min(k * (stages - stage), m) for stage in range(stages)]

    def programs(k: int, m: int) -> Program:
        return build("kfkb", Size(stages, m, group_size=k), bpipe)

    return GroupedSchedule("kfkb", stages, bpipe, programs, settled, None if bpipe else live)
