"""The command ``evenpipe``: find the sub-command, run it, and turn bad input into one line and exit status 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from evenpipe import __version__
from evenpipe.cli.parser import Parser, UsageError

__all__ = ["main"]

#: Modules of this room; each has ``add_to(commands)``, which adds a parser whose default ``run`` takes the arguments
#: and returns the exit status, if it is not 0.
_COMMANDS = (
    *("schedule", "simulate", "candidates", "estimate", "plan", "recipe", "partition", "train", "demo", "report"),
    *("run", "patches", "doctor"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's) and return its exit status.

    Raises SystemExit with status 2 on bad input, after one line on standard error.
    """
    parser = Parser("evenpipe", description="Pipeline parallelism with level memory and fewer bubbles.")
    parser.add_argument("--version", action="version", version=f"evenpipe {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    words = sys.argv[1:] if argv is None else list(argv)
    # `run` is started in every process of a job: it must not wait for what other commands import.
    for name in words[:1] if words[:1] and words[0] in _COMMANDS else _COMMANDS:
        import_module(f"evenpipe.cli.{name}").add_to(commands)
    arguments = parser.parse_args(words)
    status = None
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
    except UsageError as error:
        arguments.parser.fail(str(error))
    except BrokenPipeError:
        # Whoever reads our output has seen enough (``| head``); the interpreter must not try to flush the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        arguments.parser.fail(
            f"cannot write the output: {error.strerror or error}; free some space, or write elsewhere"
        )
    return status or 0
