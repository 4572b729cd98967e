"""Options and help for what is described: a model, a cluster and a framework."""

from __future__ import annotations

from argparse import ArgumentParser, _ArgumentGroup
from typing import Final

from evenpipe.planner.descriptions import names

__all__ = ["MODEL_HELP", "add_what_and_where", "known_names"]

MODEL_HELP: Final = "a name, or PATH.yaml[:NAME]"


def add_what_and_where(parser: ArgumentParser) -> _ArgumentGroup:
    """The options that `evenpipe estimate` and `evenpipe plan` both begin with."""
    group = parser.add_argument_group("what and where")
    group.add_argument("--model", required=True, metavar="NAME", help=MODEL_HELP)
    group.add_argument("--cluster", required=True, metavar="NAME", help="NODESxGPUS-NAME, or PATH.yaml[:NAME]")
    group.add_argument("--framework", metavar="NAME", help=f"{' | '.join(names('frameworks'))} (default: the model's)")
    return group


def known_names() -> str:
    """For the end of a command's help."""
    return (
        f"Models: {', '.join(names('models'))}. Clusters: {', '.join(names('clusters'))}; with a size: 4x8-a100-80gb."
    )
