"""The argument parser: bad input ends the process with status 2 and one line on standard error."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

__all__ = ["STANDARD_OUTPUT", "Commands", "Parser", "UsageError"]

#: The value of an option of an output that is `-`.
STANDARD_OUTPUT: Final = Path("/dev/stdout")


class UsageError(Exception):
    """Bad input found after parsing; the message is one line that names the argument and the remedy."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviated options and without the usage text before an error.

    The parsed arguments hold, as ``parser``, the parser of the sub-command they are for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self.set_defaults(parser=self)

    def written_to_standard_output(self, arguments: argparse.Namespace) -> list[str]:
        """Return the options whose value is ``-``, which stands for standard output, as they are spelt."""
        return [
            action.option_strings[0]
            for action in self._actions
            if action.option_strings and getattr(arguments, action.dest, None) == STANDARD_OUTPUT
        ]

    def error(self, message: str) -> NoReturn:
        self.fail(f"{message} (see {self.prog} --help)")

    def fail(self, message: str) -> NoReturn:
        """End the process with status 2 and ``message`` on one line, in which nothing steers a terminal."""
        line = " ".join(message.split())
        shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in line)
        self.exit(2, f"{self.prog}: error: {shown}\n")


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
