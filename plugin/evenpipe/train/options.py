"""The options of `evenpipe train`, checked by the rules of `evenpipe.train.rules`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final

from pydantic import ValidationError, model_validator

from evenpipe.settings.config import first_problem
from evenpipe.settings.spelling import command_flag
from evenpipe.train.fields import OptionFields
from evenpipe.train.planned_options import OptionsError, as_planned
from evenpipe.train.rules import RULES

__all__ = ["OptionsError", "TrainOptions"]

#: Of schedules whose stages step by themselves, which no norm of all gradients can hold up.
_NOT_CLIPPED: Final = {"paci": {"clip_grad": 0.0}}


class TrainOptions(OptionFields):
    """A training run. `TrainOptions.of(...)` gives one-line errors, the constructor pydantic's own."""

    rules: ClassVar[tuple[Callable[[OptionFields], None], ...]] = RULES

    @classmethod
    def of(cls, **values: Any) -> TrainOptions:
        """Checked options. Raises OptionsError: one line that names the flag and what to do."""
        try:
            return cls(**_NOT_CLIPPED.get(str(values.get("schedule")), {}) | as_planned(values))
        except ValidationError as error:
            raise OptionsError(_in_one_line(error)) from None

    @model_validator(mode="after")
    def _go_together(self) -> TrainOptions:
        for rule in self.rules:
            rule(self)
        return self


def _in_one_line(error: ValidationError) -> str:
    """Return the first thing that pydantic found, as a line of ours."""
    first = error.errors()[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    (field, *_), given, wrong = first_problem(error)
    if first["type"] == "extra_forbidden":
        return f"{command_flag(str(field))}: no such option: see evenpipe train --help"
    return f"{command_flag(str(field))} {given}: {wrong}"
