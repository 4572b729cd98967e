"""EvenPipe's settings as flags of Megatron's argument parser, and back."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, Final, NoReturn

from evenpipe.settings.config import ConfigError, EvenPipeConfig
from evenpipe.settings.spelling import flag
from evenpipe.upstream.ending import end_job

__all__ = ["ArgumentError", "add_flags", "config_from", "destination"]


class ArgumentError(ValueError):
    """Arguments under which EvenPipe cannot run; one line: which flags, why they do not go together, what to do."""


_PREFIX: Final = "--evenpipe-"
_NEGATED: Final = "--no-evenpipe-"
#: How alike a misspelt short name is, as difflib has it: no flag of Megatron-LM is so near to one.
_SLIP: Final = 0.85


def destination(setting: str) -> str:
    """Return the attribute of Megatron's arguments that holds a field of EvenPipeConfig: `bpipe` is evenpipe_bpipe."""
    return f"evenpipe_{setting}"


def add_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add the group "EvenPipe" to `parser`, with a flag for every field of EvenPipeConfig, and return `parser`.

    Each is called --evenpipe-…. Short names, such as --bpipe, are added when `parser` parses, unless a script has given
    them a meaning of its own by then. An unknown --evenpipe-… ends the job with one line.
    """
    group = parser.add_argument_group(title="EvenPipe")
    short: dict[str, dict[str, Any]] = {}
    for setting, field in EvenPipeConfig.model_fields.items():
        options: dict[str, Any] = {"dest": destination(setting)}
        if field.annotation is bool:
            options["action"] = "store_true"
        elif field.annotation == bool | None:
            options["action"] = argparse.BooleanOptionalAction
        else:
            # Values are checked with everything else: argparse would print Megatron's whole usage before its line.
            assert isinstance(field.json_schema_extra, dict)
            options["metavar"] = field.json_schema_extra["metavar"]
        name = _PREFIX + setting.replace("_", "-")
        group.add_argument(name, **options, default=field.default, help=field.description)
        for other in {flag(setting), _short(setting)} - {name}:
            short[other] = {**options, "default": argparse.SUPPRESS, "help": f"short for {name}"}
    replaced = {"parse_known_args": functools.partial(_parse, parser.parse_known_args, group, short)}
    vars(parser).update(replaced, error=functools.partial(_complain, parser.error))
    return parser


def _short(setting: str) -> str:
    """Return the name by which a user may give it in fewer letters: --evenpipe for --evenpipe-schedule."""
    extra = EvenPipeConfig.model_fields[setting].json_schema_extra
    assert isinstance(extra, dict)
    return str(extra.get("short", flag(setting)))


def _parse(
    original: Callable[..., tuple[Namespace, list[str]]],
    group: Any,
    short: dict[str, dict[str, Any]],
    *given: Any,
    **named: Any,
) -> tuple[Namespace, list[str]]:
    """Parse with the short names that are free; an unknown --evenpipe-…, or nearly a short name, ends the job."""
    for name, options in short.items():
        with contextlib.suppress(argparse.ArgumentError):  # the script's own
            group.add_argument(name, **options)
    args, unknown = original(*given, **named)
    for word in unknown:
        name = word.partition("=")[0]
        if word.startswith((_PREFIX, _NEGATED)):
            known = [setting.replace("_", "-") for setting in EvenPipeConfig.model_fields]
            close = get_close_matches(name.removeprefix(_NEGATED).removeprefix(_PREFIX), known, n=1)
            hint = f"did you mean {_PREFIX}{close[0]}?" if close else f"there are {_PREFIX}{', '.join(known)}"
            end_job(f"{name}: there is no such flag: {hint}")
        # Megatron would print its whole usage, on every rank, and where a script ignores unknown flags nothing.
        if word.startswith("--") and (close := get_close_matches(name, _spellings(short), n=1, cutoff=_SLIP)):
            end_job(f"{name}: there is no such flag: did you mean {close[0]}?")
    return args, unknown


def _spellings(short: dict[str, dict[str, Any]]) -> list[str]:
    """Return the short names, and --no-… of those that have one."""
    negated = [name for name, options in short.items() if options.get("action") is argparse.BooleanOptionalAction]
    return [*short, *(f"--no-{name.removeprefix('--')}" for name in negated)]


def _complain(original: Callable[[str], NoReturn], message: str) -> NoReturn:
    """End the job with one line for flags called --evenpipe-…; Megatron's usage, of 1,200 lines, is for its own."""
    if _PREFIX in message:
        end_job(message)
    original(message)


def config_from(args: Namespace, argv: Sequence[str] | None = None) -> EvenPipeConfig:
    """Return the settings in Megatron's `args`; those that are missing there (a YAML configuration) come from `argv`.

    `argv` is the process's by default. `args` gets what was missing; a YAML configuration may use short names, as flags
    have them. Raises ArgumentError for a value that cannot be.
    """
    missing = [setting for setting in EvenPipeConfig.model_fields if not hasattr(args, destination(setting))]
    if missing:
        given, _ = add_flags(ArgumentParser(add_help=False, allow_abbrev=False)).parse_known_args(
            sys.argv[1:] if argv is None else argv
        )
        for setting in missing:
            value = getattr(given, destination(setting))
            for name in (flag(setting), _short(setting)):
                value = getattr(args, name.removeprefix("--").replace("-", "_"), value)
            setattr(args, destination(setting), value)
    try:
        return EvenPipeConfig.of(
            **{setting: getattr(args, destination(setting)) for setting in EvenPipeConfig.model_fields}
        )
    except ConfigError as error:
        raise ArgumentError(f"{flag(error.setting)} {error}") from None
