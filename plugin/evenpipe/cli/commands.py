"""The sub-commands and what each does: to list them, none of their modules is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from evenpipe.cli.parser import Commands, Parser

__all__ = ["COMMANDS", "add_command", "list_commands", "sentence"]

#: Modules of this room, in the order of the help; each has ``add_to(commands)``, which adds a parser whose default
#: ``run`` takes the arguments and returns the exit status, if it is not 0.
COMMANDS: Final[Mapping[str, str]] = {
    "schedule": "show which actions every stage carries out, in which order",
    "simulate": "show the time, bubbles and peaks of a schedule",
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
