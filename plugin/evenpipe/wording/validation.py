"""Pydantic's findings in plain words, for the one line that a user reads."""

from __future__ import annotations

from typing import Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

__all__ = ["first_message", "plain_message"]

_PLAIN: Final = {
    "missing": "is missing",
    "extra_forbidden": "unknown key",
    "json_invalid": "is no JSON",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "too_short": "has too few items",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "string_type": "must be a text",
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float", "int_parsing_size"), "must be a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
}


def plain_message(found: ErrorDetails) -> str:
    """Return what is wrong with a value, such as ``must be a whole number``."""
    plain = found["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return _PLAIN.get(found["type"], plain)


def first_message(error: ValidationError, whole: str) -> str:
    """Return the path of the first thing that is wrong, and what, such as ``parts.0.forward_ms: is missing``.

    ``whole`` is said for the path where the document itself is wrong.
    """
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {plain_message(first)}"
