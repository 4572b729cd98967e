"""Layers of each part of a pipeline such that its stages are equally fast, each on nodes of its own speed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

__all__ = ["Layout", "balanced_layout", "settled_layout", "slowest_stage"]


class Layout(NamedTuple):
    """The layers of each part of a pipeline; ``further``: the part that predicts further tokens, the last if None."""

    layers: tuple[int, ...]
    further: int | None = None

    @property
    def even(self) -> bool:
        return self.further is None and len(set(self.layers)) < 2


def balanced_layout(
    layers: int,
    owners: Sequence[int],
    bare: Sequence[float],
    each: Sequence[float],
    most: Sequence[int] | None = None,
    saved: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Return the layers of each part such that the slowest stage is as fast as can be; ``owners``: each part's stage.

    bare: seconds of each part without layers. each: those of a layer on each stage. most: the most layers of each
    stage; layers beyond these go to the stage that is full last. saved: seconds that some layers of each part take less
    than ``each`` says.

    A part that has nothing else has a layer. The others go one by one to the stage that is the fastest with one more,
    and there to the fastest part, which is optimal for equal layers. A tie goes to the later stage or part: earlier
    ones hold more micro-batches.
    """
    if len(owners) == 1:
        return (layers,)
    found = [int(not seconds) for seconds in bare]
    of_stage: dict[int, list[tuple[float, int]]] = {}
    room = list(most or [layers] * len(each))
    for position, (stage, seconds) in enumerate(zip(owners, bare, strict=True)):
        less = saved[position] if saved else 0.0
        of_stage.setdefault(stage, []).append((seconds + each[stage] * found[position] - less, -position))
        room[stage] -= found[position]
    fastest = min(each)  # equal layers leave the keys as they are
    queue = [(sum(seconds for seconds, _ in of) + each[stage] - fastest, -stage) for stage, of in of_stage.items()]
    heapq.heapify(queue)
    for of in of_stage.values():
        heapq.heapify(of)
    for _ in range(layers - sum(found)):
        while len(queue) > 1 and room[-queue[0][1]] <= 0:
            heapq.heappop(queue)
        seconds, stage = queue[0]
        of = of_stage[-stage]
        fewest, position = of[0]
        found[-position] += 1
        room[-stage] -= 1
        heapq.heapreplace(of, (fewest + each[-stage], position))
        heapq.heapreplace(queue, (seconds + each[-stage], stage))
    return tuple(found)


#: Layouts that are found one after the other where layers differ.
_MOST_PASSES: Final = 4


def settled_layout(
    layers: int,
    owners: Sequence[int],
    bare: Sequence[float],
    each: Sequence[float],
    most: Sequence[int] | None,
    saved_of: Callable[[Sequence[int]], Sequence[float]],
) -> tuple[float, tuple[int, ...]]:
    """Return the seconds of the slowest stage, and the layers of each part, where some layers take less than others.

    saved_of: seconds that each part of a layout takes less than if its layers were all alike. Where the shorter layers
    are depends on the layout, so it is found again with what they save, until it stays; the fastest is taken. The rest
    is `balanced_layout`'s.
    """
    saved: Sequence[float] = [0.0] * len(owners)
    found: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(_MOST_PASSES):
        layout = balanced_layout(layers, owners, bare, each, most, saved)
        before, saved = saved, saved_of(layout)
        own = [seconds - less for seconds, less in zip(bare, saved, strict=True)]
        found.append((slowest_stage(layout, owners, own, each), layout))
        if saved == before:
            break
    return min(found, key=lambda one: one[0])


def slowest_stage(layout: Sequence[int], owners: Sequence[int], bare: Sequence[float], each: Sequence[float]) -> float:
    """Return the seconds of the stage that takes longest; arguments as `balanced_layout` has them."""
    of_stage = [0.0] * len(each)
    for stage, seconds, layers in zip(owners, bare, layout, strict=True):
        of_stage[stage] += seconds + each[stage] * layers
    return max(of_stage)
