"""The sub-commands by name, and the parser: bad input ends the process with status 2 and one line on standard error."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

__all__ = [
    "COMMANDS",
    "STANDARD_OUTPUT",
    "Commands",
    "Parser",
    "UsageError",
    "add_command",
    "list_commands",
    "sentence",
]

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


#: Modules of this room, in the order of the help; each has ``add_to(commands)``, which adds a parser whose default
#: ``run`` takes the arguments and returns the exit status, if it is not 0.
COMMANDS: Final[Mapping[str, str]] = {
    "schedule": "show which actions every stage carries out, in which order",
    "simulate": "show the time, bubbles and peaks of a schedule",
    "costs": "read the times of each part of a model out of the trace of a run, for a schedule made for them",
    "candidates": "show which group sizes k and micro-batch sizes b of kfkb fit into memory",
    "estimate": "estimate memory, time and MFU of a run from descriptions of model and cluster",
    "plan": "find the fastest runs of a model that fit a cluster",
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
    """Return a new parser of the sub-command `name`; `texts` are those of argparse beside its line in the list."""
    return commands.add_parser(name, help=COMMANDS[name], **{"description": sentence(name), **texts})


def list_commands(commands: Commands) -> None:
    """Add all sub-commands by name alone, for the help and for errors that name them."""
    for name in COMMANDS:
        add_command(commands, name)
