"""Bytes of every stage of a run, from its options alone: a child process builds the model on the meta device."""

from __future__ import annotations

from collections.abc import Sequence

from evenpipe.planner.memory import StageMemory
from evenpipe.runtime.communicators import link_bytes
from evenpipe.runtime.processes import ChildFailed, answer_of
from evenpipe.schedule import links, loop
from evenpipe.train.options import RULES, TrainOptions, device_type, fits_this_machine

__all__ = ["PlannedRun", "ProfileError", "stage_memories", "stage_memory"]


class ProfileError(ChildFailed):
    """The engine could not build or run the model; the message is the error's line, `details` its traceback."""


class PlannedRun(TrainOptions):
    """A training run for machines elsewhere, of any number of processes."""

    rules = tuple(rule for rule in RULES if rule is not fits_this_machine)


def stage_memory(options: TrainOptions, device: str | None = None) -> tuple[StageMemory, ...]:
    """What one process of every stage holds, with one model chunk a stage; byte for byte what a run would count.

    `device` None is what `evenpipe train` would take here; on CPU dropout's masks are larger. Raises ProfileError.
    """
    [found] = stage_memories([options], device or device_type(options.world_size))
    return found


def stage_memories(cases: Sequence[TrainOptions], device: str) -> list[tuple[StageMemory, ...]]:
    """`stage_memory` of several runs, from one child process.

    The real model runs its forward for micro-batches of one and two samples, without memory and without values: a few
    seconds at any size. Neither torch.distributed nor the engine is touched in the calling process.
    """
    asked = {"cases": [options.model_dump(mode="json") for options in cases], "device": device}
    try:
        answer = answer_of("evenpipe.megatron.train_engine.profile", asked)
    except ChildFailed as error:
        raise ProfileError(f"the model cannot be profiled: {error}", error.details) from None
    found = [[StageMemory(*stage) for stage in stages] for stages in answer]
    if device == "cuda":
        found = [_with_links(stages, options) for stages, options in zip(found, cases, strict=True)]
    return [tuple(stages) for stages in found]


def _with_links(stages: Sequence[StageMemory], options: TrainOptions) -> list[StageMemory]:
    """What communicators take stays from batch to batch, as weights do."""
    joined = links(loop(options.stages), options.bpipe)
    return [
        stage._replace(static_bytes=stage.static_bytes + link_bytes(joined, number))
        for number, stage in enumerate(stages)
    ]
