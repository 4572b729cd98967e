"""How front ends write settings: as flags (--group-size auto), or as keys of a JSON section ("group_size": "auto").

FLAGS are Megatron's, COMMAND those of the commands of `evenpipe`, SECTION is DeepSpeed's configuration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from evenpipe.settings.config import EvenPipeConfig

__all__ = ["COMMAND", "FLAGS", "SECTION", "Spelling", "command_flag", "flag", "in_flags"]


class Spelling(NamedTuple):
    """Writes a setting: at the head of a line, with its value; amid one, with a value or (None) without."""

    head: Callable[[str, Any], str]
    mention: Callable[[str, Any], str]


def flag(setting: str) -> str:
    """Return the flag of a field of EvenPipeConfig on Megatron's command line: `schedule` is --evenpipe-schedule."""
    extra = EvenPipeConfig.model_fields[setting].json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["flag"])


def _with_flags(flag_of: Callable[[str], str]) -> Spelling:
    """Return the spelling of a command line whose flags are what `flag_of` makes of a setting's name."""

    def written(setting: str, value: Any) -> str:
        name = flag_of(setting)
        if value is None or value is True:
            return name
        if value is False:
            return name.replace("--", "--no-", 1)
        return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"

    return Spelling(written, written)


def _key(setting: str, value: Any) -> str:
    return setting if value is None else f'"{setting}": {json.dumps(value, default=str)}'


def _path(setting: str, value: Any) -> str:
    return f"evenpipe.{setting}: {json.dumps(value, default=str)}"


def command_flag(setting: str) -> str:
    """The flag of a setting or training option in the commands of `evenpipe`: `micro_batches` is --micro-batches."""
    return "--" + setting.replace("_", "-")


FLAGS: Final = _with_flags(flag)
COMMAND: Final = _with_flags(command_flag)
SECTION: Final = Spelling(_path, _key)


def in_flags(error: Exception) -> str:
    """Return the first line of `error`, with `chunks=1:` as the commands of `evenpipe` have it: `--chunks 1:`."""
    line = str(error).partition("\n")[0]
    return re.sub(r"^(\w+)(?:=(\S*))?:", lambda match: COMMAND.mention(match[1], match[2]) + ":", line)
