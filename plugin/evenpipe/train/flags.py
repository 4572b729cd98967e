"""Options as the user wrote them: the names of flags, and errors in one line that names them."""

from __future__ import annotations

from pydantic import ValidationError

__all__ = ["OptionsError", "flag", "in_one_line"]


class OptionsError(ValueError):
    """Options that cannot be run; one line that names the flag and what to do."""


def flag(field: str) -> str:
    """The command-line flag of a field of TrainOptions: `micro_batches` is --micro-batches."""
    return "--" + field.replace("_", "-")


def in_one_line(error: ValidationError) -> str:
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
