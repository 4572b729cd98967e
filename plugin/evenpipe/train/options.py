"""What `evenpipe train` runs: one frozen, checked set of options, and errors in one line that names a flag."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError, model_validator

from evenpipe.train.fields import TrainFields
from evenpipe.train.rules import RULES

__all__ = ["OptionsError", "TrainOptions", "flag"]


class OptionsError(ValueError):
    """Options that cannot be run; one line that names the flag and what to do."""


class TrainOptions(TrainFields):
    """A training run. `TrainOptions.of(...)` gives one-line errors, the constructor pydantic's own."""

    @classmethod
    def of(cls, **values: Any) -> TrainOptions:
        """Checked options. Raises OptionsError: one line that names the flag and what to do."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise OptionsError(_in_one_line(error)) from None

    @model_validator(mode="after")
    def _go_together(self) -> TrainOptions:
        for rule in RULES:
            rule(self)
        return self


def flag(field: str) -> str:
    """The command-line flag of a field of TrainOptions: `micro_batches` is --micro-batches."""
    return "--" + field.replace("_", "-")


def _in_one_line(error: ValidationError) -> str:
    """The first thing that pydantic found, as a line of ours."""
    first, *others = error.errors()
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    field = str(first["loc"][0])
    # A field of several types has something to say for each of them.
    said = " or ".join(
        found["msg"].removeprefix("Input should be ") for found in (first, *others) if found["loc"][0] == field
    )
    if first["type"] == "extra_forbidden":
        return f"{flag(field)}: no such option: see evenpipe train --help"
    return f"{flag(field)} {first['input']}: must be {said}"
