"""An order that is searched for the estimated times and the memory of a run, as a run itself searches one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from evenpipe.descriptions import Device
from evenpipe.planner.run import EstimateError, Run
from evenpipe.planner.stage_bytes import StageBytes
from evenpipe.planner.stage_nodes import Positions
from evenpipe.schedule import Program, ScheduleError
from evenpipe.simulate import Costs

__all__ = ["SEARCHED_ACTIONS", "caps", "searched_gib", "searched_program"]

#: Actions of an order that is searched in seconds: three a part and micro-batch.
SEARCHED_ACTIONS: Final = 6_000
#: The share of a device's memory that an order may use; what is left is for fragments.
_SHARE: Final = 0.95
_SECONDS: Final = 1.5
_SAMPLES: Final = 4
_GIB: Final = 2**30


def caps(none: Sequence[StageBytes], some: Sequence[StageBytes], devices: Sequence[Device]) -> list[int]:
    """Return the bytes that stages may save. none, some: what they need where they save nothing, and a GiB."""
    found = []
    for empty, fuller, device in zip(none, some, devices, strict=True):
        each = (fuller.total - empty.total) / _GIB  # what is saved, and what fragments take beside it
        found.append(max(0, int((searched_gib(device) * _GIB - empty.total) / each)))
    return found


def searched_gib(device: Device) -> float:
    """Return the memory for which an order is searched, as `--memory-gib` is to say it."""
    return int(_SHARE * device.memory_gib * 10) / 10


def searched_program(
    run: Run,
    where: Positions,
    costs: Costs,
    units: Sequence[Sequence[int]],
    left: Sequence[Sequence[int]],
    memory_bytes: Sequence[int],
) -> Program:
    """Return the best order that is found in a second or two. Raises EstimateError where the memory holds none.

    units, left: bytes that each stage's chunks save of a micro-batch, and keep between the halves of its backward.
    """
    from evenpipe.order_search.costs import FORMAT, Part, RunCosts
    from evenpipe.order_search.search import Effort
    from evenpipe.simulate.searched import searched

    actions = 3 * len(where.stages) * run.micro_batches
    if actions > SEARCHED_ACTIONS:
        raise EstimateError(
            f"schedule=searched: {actions:,} actions of {run.micro_batches} micro-batches are more than an estimate "
            f"searches ({SEARCHED_ACTIONS:,}): give fewer micro-batches, or another schedule"
        )
    parts = []
    for position, stage in enumerate(where.stages):
        chunk = where.at[stage].index(position)
        ms = costs.of(stage, run.chunks)[chunk]
        parts.append(
            Part(
                forward_ms=ms["forward"],
                input_gradient_ms=ms["input_gradient"],
                weight_gradient_ms=ms["weight_gradient"],
                saved_bytes=units[stage][chunk],
                freed_by_input_gradient_bytes=units[stage][chunk] - left[stage][chunk],
            )
        )
    message_ms = max((sum(wire[:2]) for wire in (*costs.wires.values(), *costs.links.values())), default=0.0)
    document = RunCosts(
        format=FORMAT,
        placement="vee" if run.chunks == 2 else "straight",
        parts=parts,
        message_ms=message_ms,
        memory_bytes=list(memory_bytes),
    )
    try:
        effort = Effort(_SECONDS, _SAMPLES)
        return searched(document, run.stages, run.micro_batches, effort, queues=run.queues).program
    except ScheduleError as error:
        raise EstimateError(f"schedule=searched: {error}") from error
