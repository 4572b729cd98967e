"""How much a command says on standard error beside its result: ``-q``, neither, or ``-v``."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from traceback import print_exception
from typing import Final

from evenpipe.wording.printable import printable

__all__ = ["Verbosity", "add_verbosity", "say", "speaking", "speaks", "warn"]


class Verbosity(IntEnum):
    """How much is printed: only warnings and errors; also progress and notes; also defaults and tracebacks."""

    QUIET = 0
    USUAL = 1
    VERBOSE = 2


_HOW_MUCH: Final[ContextVar[Verbosity]] = ContextVar("verbosity", default=Verbosity.USUAL)


def add_verbosity(parser: ArgumentParser) -> None:
    """Add -q and -v, which exclude each other."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument("-q", "--quiet", action="store_true", help="show no progress and no notes; warnings stay")
    either.add_argument(
        "-v", "--verbose", action="store_true", help="name the defaults read from files; show an error's traceback"
    )


@contextmanager
def speaking(arguments: Namespace) -> Iterator[None]:
    """Say as much as the options ask for, until the command ends; with -v, print the traceback of its error."""
    how_much = Verbosity.QUIET if arguments.quiet else Verbosity.VERBOSE if arguments.verbose else Verbosity.USUAL
    before = _HOW_MUCH.set(how_much)
    try:
        yield
    except Exception as error:
        if arguments.verbose and not isinstance(error, BrokenPipeError):
            print_exception(error)
        raise
    finally:
        _HOW_MUCH.reset(before)


def speaks(at: Verbosity = Verbosity.USUAL) -> bool:
    """Return whether what is said from ``at`` on is said now."""
    return _HOW_MUCH.get() >= at


def say(line: str, at: Verbosity = Verbosity.USUAL) -> None:
    """Print a note, unless less is to be said than ``at``."""
    if speaks(at):
        warn(line)


def warn(line: str) -> None:
    """Print a warning, which -q leaves."""
    print(f"evenpipe: {printable(line)}", file=sys.stderr)
