"""A schedule for the times of one run, which are measured while it trains (:mod:`evenpipe.order_search`)."""

from __future__ import annotations

from typing import NoReturn

from evenpipe.schedule.actions import ScheduleError
from evenpipe.schedule.spec import Size, Spec
from evenpipe.schedule.topology import loop, vee

__all__ = ["SPEC"]


def _made_for_times(size: Size) -> NoReturn:
    raise ScheduleError(
        "schedule=searched: is made for given times: write it with `evenpipe schedule --schedule searched --costs "
        "COSTS.json --out S.txt`, and name file:S.txt"
    )


SPEC = Spec(
    name="searched",
    summary="an order searched for the run's own times, within its memory; of two model chunks a stage, there and back",
    order=_made_for_times,
    bound=lambda size: size.chunks * size.micro_batches,
    places=lambda size: vee(size.stages) if size.chunks == 2 else loop(size.stages),
    chunks=(1, 2),
    needs=frozenset(["split", "times"]),
    needs_with_chunks=frozenset(["chunks", "vee"]),
)
