"""The command ``evenpipe``: find the sub-command, run it, and turn bad input into one line and exit status 2."""

from __future__ import annotations

import codecs
import errno
import signal
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from importlib import import_module
from io import TextIOWrapper
from itertools import takewhile
from typing import Any, Final

from evenpipe import __version__
from evenpipe.cli.defaults import take_defaults
from evenpipe.cli.parser import COMMANDS, Parser, RunFailed, UsageError, discard_output, list_commands
from evenpipe.cli.verbosity import Verbosity, say, speaking

__all__ = ["main"]

#: What goes wrong with a write, and with hardly anything else. Room for processes is looked at before they start.
_OF_WRITING = (errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC)

#: What is written where there are only ASCII characters.
_ASCII: Final = {"×": "x", "–": "-", "→": "->", "−": "-", "…": "...", "·": "."}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's) and return its exit status.

    Raises SystemExit after one line on standard error: with status 2 on bad input, with 1 where a run failed. After
    Ctrl-C the status is 130.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    _write_what_can_be_written()
    try:
        return _run(words)
    except KeyboardInterrupt:
        # A second one must not interrupt what is being put away.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(" ".join(("evenpipe", *words[:1])) + ": stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT


def _write_what_can_be_written() -> None:
    """Have streams write another character where their encoding has none for one of ours, in place of an error."""
    codecs.register_error("evenpipe", _instead)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="evenpipe")


def _instead(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    written = (_ASCII.get(character, "?") for character in error.object[error.start : error.end])
    return "".join(written), error.end


def _run(words: list[str]) -> int:
    about = "Pipeline parallelism with level memory and fewer bubbles."
    parser = Parser("evenpipe", description=about, beyond="a command's own go after it")
    parser.add_argument("--version", action="version", version=f"evenpipe {__version__}")
    shells = ("bash", "zsh", "fish")
    written = "print what completes commands and options in a shell: source <(evenpipe --completion bash)"
    parser.add_argument("--completion", action=_Completion, choices=shells, metavar="|".join(shells), help=written)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    before = list(takewhile(lambda word: word.startswith("-"), words))
    name = None if before else next(iter(words), None)
    # `run` is started in every process of a job: it must not wait for what other commands import.
    if name is not None and name in COMMANDS:
        import_module(f"evenpipe.cli.{name}").add_to(commands)
        own = commands.choices[name]
        try:
            defaults = take_defaults(own, name, words[1:])
        except UsageError as error:
            own.fail(str(error))
    else:
        defaults = []
        list_commands(commands)
    arguments = parser.parse_args(words if "--completion" in before else before or words)
    status = None
    try:
        with speaking(arguments), _text_beside(arguments):
            for line in defaults:
                say(line, Verbosity.VERBOSE)
            status = arguments.run(arguments)
        sys.stdout.flush()
    except UsageError as error:
        arguments.parser.fail(str(error))
    except RunFailed as failure:
        print(failure.details, end="", file=sys.stderr)
        arguments.parser.end(1, str(failure))
    except BrokenPipeError:
        discard_output()  # whoever reads it has seen enough (``| head``)
    except OSError as error:
        said = error.strerror or str(error)
        if error.filename is None and error.errno in _OF_WRITING:  # to standard output, which has no name
            discard_output()
            arguments.parser.fail(f"cannot write the output: {said}; free some space, or write elsewhere")
        arguments.parser.fail(said if error.filename is None else f"{error.filename}: {said}")
    return status or 0


class _Completion(Action):
    """Prints the script of a shell, and ends like --version."""

    def __call__(self, parser: ArgumentParser, _: Namespace, value: Any, option: str | None = None) -> None:
        from evenpipe.cli.completion import completion

        print(completion(value), end="")
        parser.exit()


def _text_beside(arguments: Namespace) -> AbstractContextManager[object]:
    """Send the command's text to standard error where an output is written to standard output.

    Raises UsageError where two documents would be written there.
    """
    taken = arguments.parser.written_to_standard_output(arguments)
    if not taken:
        return nullcontext()
    if len(taken) > 1 or getattr(arguments, "json", False):
        other = taken[1] if len(taken) > 1 else "--json"
        raise UsageError(f"{taken[0]} -: {other} is written to standard output too: name a file for one of them")
    return redirect_stdout(sys.stderr)
