"""A schedule as the table that torch.distributed.pipelining reads (``_load_csv``, format ``compute_only``)."""

from __future__ import annotations

from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.kinds import BACKWARD, COMPUTE, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Kind
from evenpipe.schedule.schedule import Schedule

__all__ = ["torch_csv"]

#: What torch calls each kind of compute.
_LETTERS: dict[Kind, str] = {FORWARD: "F", BACKWARD: "B", INPUT_GRADIENT: "I", WEIGHT_GRADIENT: "W"}


def torch_csv(schedule: Schedule) -> str:
    """One line a stage of the pipeline (torch's rank), such as ``0F0,0F1,4F0``: what torch calls stage is a position.

    A position is a part of the model, counted from its start; torch knows compute only. Raises :class:`ScheduleError`
    for a schedule with actions that torch has none for.
    """
    places = schedule.places
    lines = []
    for stage, row in enumerate(schedule.actions):
        words = []
        for action in row:
            if action.kind not in COMPUTE:
                raise ScheduleError(f"{action}: torch's tables have compute only: use another schedule, without bpipe")
            words.append(f"{places.position(stage, action.chunk)}{_LETTERS[action.kind]}{action.micro_batch}")
        lines.append(",".join(words))
    return "\n".join(lines) + "\n"
