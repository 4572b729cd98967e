"""The sub-commands by name, and the parser: bad input ends the process with status 2 and one line on standard error."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

from evenpipe.cli.verbosity import add_verbosity
from evenpipe.wording.parsing import in_plain_words
from evenpipe.wording.printable import printable

__all__ = [
    "COMMANDS",
    "STANDARD_OUTPUT",
    "Commands",
    "Parser",
    "RunFailed",
    "UsageError",
    "add_command",
    "add_schedule",
    "discard_output",
    "list_commands",
    "sentence",
]

#: The value of an option of an output that is `-`.
STANDARD_OUTPUT: Final = Path("/dev/stdout")


class UsageError(Exception):
    """Bad input found after parsing; the message is one line that names the argument and the remedy."""


class RunFailed(Exception):
    """A run that failed, with good input; the message is one line. ``details``, such as its traceback, come before."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def discard_output() -> None:
    """Drop what is still to be written to standard output, which takes no more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviated options, whose errors are one line without the usage text.

    A sub-command refuses its own unknown words; ``beyond`` says where options of another program go. The parsed
    arguments hold, as ``parser``, the parser of the sub-command they are for.
    """

    def __init__(self, *args: Any, beyond: str = "", **kwargs: Any) -> None:
        kwargs |= {"allow_abbrev": False, "exit_on_error": False}
        super().__init__(*args, **kwargs)
        self._beyond = beyond
        self._as_json = False
        self._sources: dict[str, str] = {}
        self.set_defaults(parser=self)

    def options(self) -> list[argparse.Action]:
        """Return the options that the help shows."""
        return [one for one in self._actions if one.option_strings and one.help != argparse.SUPPRESS]

    def excluded_by(self, action: argparse.Action) -> list[argparse.Action]:
        """Return the options that cannot be given beside this one."""
        groups = [group._group_actions for group in self._mutually_exclusive_groups]
        return [other for group in groups if action in group for other in group if other is not action]

    def take_default(self, action: argparse.Action, value: Any, source: str) -> None:
        """Give an option a default of a file's; an error that begins with the option names ``source``."""
        for name in action.option_strings:
            self._sources[name] = source
        name, values = action.option_strings[0], value if isinstance(value, list) else [value]
        switch = action.nargs == 0
        if switch != isinstance(value, bool) or (isinstance(value, list) and action.nargs != "+"):
            self.fail(f"{name}: {value!r} is no value of it{': give true or false' if switch else ''}")
        if value is False:
            return  # as if it was not given
        try:
            taken = action.const if switch else self._get_values(action, list(map(str, values)))
        except argparse.ArgumentError as error:
            self.fail(f"{name}: {error.message.removeprefix(f'{name} ').removeprefix(f'{name}: ')}")
        self.set_defaults(**{action.dest: taken})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all words. An unknown word is reported before a missing option, for which it may be meant."""
        self._as_json = "--json" in args
        groups = [group for group in self._mutually_exclusive_groups if group.required]
        required: list[Any] = [*(action for action in self._actions if action.required), *groups]
        for one in required:
            one.required = False
        try:
            found, unknown = super().parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            names = (error.argument_name or "").split("/")
            name = next((one for one in names if one.startswith("--")), names[0])
            said = re.sub(r"^ignored explicit argument (.*)", r"takes no value: leave \1 out", error.message)
            said = in_plain_words(said)
            self.error(f"{name}: {said}" if name else said)
        finally:
            for one in required:
                one.required = True
        self._as_json = getattr(found, "json", self._as_json)
        if unknown:
            self._refuse(next((word for word in unknown if word.startswith("-")), unknown[0]))
        needed: list[tuple[argparse.Action, ...]] = [
            (one,) for one in self._actions if one.required and one.nargs != argparse.REMAINDER
        ]
        needed += [tuple(group._group_actions) for group in groups]
        missing = [
            " or ".join(_named(one, str(one.metavar)) for one in each)
            for each in needed
            if all(getattr(found, one.dest) is None for one in each)
        ]
        if missing:
            self.error(f"missing {', '.join(missing)}")
        return found, unknown

    def _refuse(self, word: str) -> NoReturn:
        from evenpipe.wording.nearest import nearest

        if not word.startswith("-"):
            self.error(f"{word}: unexpected argument")
        option = word.partition("=")[0]
        known = [name for action in self._actions if action.help != argparse.SUPPRESS for name in action.option_strings]
        said = nearest(option, known, _CLOSE)
        hint = f", {said}" if said.startswith("did") else self._beyond and f": {self._beyond}"
        self.error(f"{option}: unknown option{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            from evenpipe.wording.nearest import nearest

            kind = "unknown command" if isinstance(action, argparse._SubParsersAction) else "unknown"
            raise argparse.ArgumentError(None, f"{_named(action, value)}: {kind}, {nearest(value, action.choices)}")

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
        """End the process with status 2 and the message on one line; it names the file that has the option, if one."""
        option = message.replace(":", " ").split(" ", 1)[0]
        source = f" (default of {self._sources[option]})" if option in self._sources else ""
        self.end(2, message + source, "error: ")

    def end(self, status: int, message: str, kind: str = "") -> NoReturn:
        """End the process after one line on standard error, in which nothing steers a terminal.

        With ``--json``, an object ``{"error": line}`` is printed too.
        """
        line = " ".join(message.split())
        shown = printable(line)
        if self._as_json:
            try:
                print(json.dumps({"error": shown}), flush=True)
            except OSError:
                discard_output()
        self.exit(status, f"{self.prog}: {kind}{shown}\n")


#: How alike an option is that may have been meant; all begin with two dashes.
_CLOSE: Final = 0.75


def _named(action: argparse.Action, value: str) -> str:
    """Return the value behind the main name of its option, if it is of one."""
    return " ".join((*action.option_strings[:1], value))


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


#: Modules of this room, in the order of the help; each has ``add_to(commands)``, which adds a parser whose default
#: ``run`` takes the arguments and returns the exit status, if it is not 0.
COMMANDS: Final[Mapping[str, str]] = {
    "schedule": "show which actions every stage carries out, in which order",
    "simulate": "show the time, bubbles and peaks of a schedule",
    "costs": "read the times of each part of a model out of the trace of a run, for a schedule made for them",
    "candidates": "show which group sizes k and micro-batch sizes b of kfkb fit into memory",
    "estimate": "estimate memory, time and MFU of a run from descriptions of model and cluster",
    "plan": "find the fastest runs of a model that fit a cluster",
    "fit": "find the fewest flags to change so that a run fits, and those that make it fast",
    "recipe": "write a planned run as files that start it: scripts, configuration, job",
    "partition": "find where to cut a model into stages, node by node, and what to swap or recompute",
    "train": "train a GPT or BERT, of megatron-core or in plain PyTorch, or what a plan cuts, under a schedule",
    "demo": "train a small GPT on four stages three ways, and compare losses, weights, memory and time",
    "report": "make one HTML page of a run, a simulation, a partition or a plan, which opens without a network",
    "run": "run a training script of Megatron-LM or DeepSpeed, unmodified, with EvenPipe in it",
    "patches": "show what EvenPipe replaces in Megatron, DeepSpeed and torch, and whether that fits what is installed",
    "doctor": "look at this machine, or with torchrun at all of a job's, and say what would keep a run from going well",
}


def sentence(name: str) -> str:
    """Return what the command does, as a sentence."""
    return f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}."


def add_command(commands: Commands, name: str, **texts: Any) -> Parser:
    """Return a new parser of the sub-command `name`, with -q and -v; `texts` are argparse's beside its line."""
    parser = commands.add_parser(name, help=COMMANDS[name], **{"description": sentence(name), **texts})
    add_verbosity(parser)
    return parser


def add_schedule(group: argparse._ActionsContainer, **texts: Any) -> None:
    """Add the option --schedule; --schedules, which the help leaves out, is the same."""
    group.add_argument("--schedule", **texts)
    group.add_argument(
        "--schedules", **{**texts, "dest": "schedule", "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    )


def list_commands(commands: Commands) -> None:
    """Add all sub-commands by name alone, for the help and for errors that name them."""
    for name in COMMANDS:
        add_command(commands, name)
