"""The schedule that a run chooses by itself, from its own times and memory: `evenpipe.tuner.choosing`."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from evenpipe.schedule.actions import ScheduleError
from evenpipe.schedule.known.searched import SPEC as SEARCHED
from evenpipe.schedule.spec import Size
from evenpipe.schedule.topology import loop, vee

__all__ = ["LOOPED", "SPEC", "WHOLE"]


def _chosen_in_a_run(size: Size) -> NoReturn:
    raise ScheduleError("schedule=auto: is chosen by runs of Megatron-LM's scripts or DeepSpeed: name another")


#: Stages with several model chunks have them one after the other, as Megatron's interleaving has.
LOOPED = replace(
    SEARCHED,
    name="auto",
    summary="the fastest schedule by the run's own times that fits its memory; with two model chunks a stage, in a V",
    order=_chosen_in_a_run,
    places=lambda size: loop(size.stages, size.chunks),
    chunks=(1, None),
    needs_with_chunks=frozenset(["chunks"]),
)
#: The same, where backwards cannot be computed in two halves.
WHOLE = replace(LOOPED, needs=frozenset(["times"]))
SPEC = replace(
    LOOPED,
    places=lambda size: vee(size.stages) if size.chunks == 2 else loop(size.stages, size.chunks),
    needs_with_chunks=SEARCHED.needs_with_chunks,
    fused_form=replace(WHOLE, chunks=(2, None), needs=frozenset(["chunks", "times"]), fused=True),
)
