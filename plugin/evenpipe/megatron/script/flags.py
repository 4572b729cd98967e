"""EvenPipe's settings as flags of Megatron's argument parser, and back."""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from evenpipe.settings.config import ConfigError, EvenPipeConfig
from evenpipe.settings.spelling import flag

__all__ = ["ArgumentError", "add_flags", "config_from", "destination"]


class ArgumentError(ValueError):
    """Arguments under which EvenPipe cannot run; one line: which flags, why they do not go together, what to do."""


def destination(setting: str) -> str:
    """The attribute of Megatron's arguments that holds a field of EvenPipeConfig."""
    return flag(setting).removeprefix("--").replace("-", "_")


def add_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add the group "EvenPipe" to `parser`, with a flag for every field of EvenPipeConfig, and return `parser`."""
    group = parser.add_argument_group(title="EvenPipe")
    for setting, field in EvenPipeConfig.model_fields.items():
        options: dict[str, Any] = {"default": field.default, "help": field.description}
        if field.annotation is bool:
            options["action"] = "store_true"
        elif field.annotation == bool | None:
            options["action"] = argparse.BooleanOptionalAction
        else:
            # Values are checked with everything else: argparse would print Megatron's whole usage before its line.
            assert isinstance(field.json_schema_extra, dict)
            options["metavar"] = field.json_schema_extra["metavar"]
        group.add_argument(flag(setting), **options)
    return parser


def config_from(args: Namespace, argv: Sequence[str] | None = None) -> EvenPipeConfig:
    """The settings in Megatron's `args`; those that are missing there (a YAML configuration) come from `argv`.

    `argv` is the process's by default. `args` gets what was missing. Raises ArgumentError for a value that cannot be.
    """
    missing = [setting for setting in EvenPipeConfig.model_fields if not hasattr(args, destination(setting))]
    if missing:
        given, _ = add_flags(ArgumentParser(add_help=False, allow_abbrev=False)).parse_known_args(
            sys.argv[1:] if argv is None else argv
        )
        for setting in missing:
            setattr(args, destination(setting), getattr(given, destination(setting)))
    try:
        return EvenPipeConfig.of(
            **{setting: getattr(args, destination(setting)) for setting in EvenPipeConfig.model_fields}
        )
    except ConfigError as error:
        raise ArgumentError(f"{flag(error.setting)} {error}") from None
