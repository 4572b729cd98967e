"""What a plan that is trained says of the run's options: its sizes, its schedule and its model."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from evenpipe.schedule import ScheduleError
from evenpipe.settings.spelling import COMMAND

__all__ = ["OptionsError", "as_planned"]

#: What a plan says, by the name of the option.
_PLANNED: Final = {
    "stages": attrgetter("stage_count"),
    "micro_batch_size": attrgetter("origin.micro_batch_size"),
    "precision": attrgetter("origin.precision"),
    **{name: attrgetter(name) for name in ("micro_batches", "chunks", "schedule", "group_size", "bpipe")},
}
#: What there is no choice of where a plan's model is trained.
_OF_THE_PLANS_MODEL: Final = ("model", "layers", "hidden", "heads", "seq_length", "untie_embeddings", "data")


class OptionsError(ValueError):
    """Options that cannot be run; one line that names the flag and what to do."""


def as_planned(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options with what their plan says, if they name one.

    Raises OptionsError where they say something else.
    """
    path = values.get("partition")
    if path is None:
        return values
    from evenpipe.partition.dawnpiper.problem import PartitionError
    from evenpipe.partition.search.plan import Plan

    try:
        plan = Plan.read(Path(path))
        _ = plan.program
    except (PartitionError, ScheduleError) as error:
        raise OptionsError(f"--partition {error}") from None
    if plan.origin.is_function and not values.get("trust"):
        file = plan.origin.model
        raise OptionsError(f"--partition {path}: its model comes from {file}: add --trust to execute that file")
    for name in _OF_THE_PLANS_MODEL:
        if name in values:
            given, bare = COMMAND.head(name, values[name]), COMMAND.mention(name, None)
            raise OptionsError(f"{given}: the model and its data are the plan's: leave {bare} out")
    says = {name: of(plan) for name, of in _PLANNED.items()} | {"engine": "planned"}
    for name, planned in says.items():
        if name in values and str(values[name]) != str(planned):
            raise OptionsError(
                f"{COMMAND.head(name, values[name])}: {path} is for {planned}: leave it out, or make a plan of your own"
            )
    return values | says
