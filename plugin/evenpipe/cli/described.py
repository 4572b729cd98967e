"""Options and help for what is described: a model, a cluster and a framework."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Callable
from typing import Any, Final

from evenpipe.cli.parser import UsageError
from evenpipe.planner.descriptions import Cluster, DescriptionError, Framework, Model, cluster, framework, model, names

__all__ = ["MODEL_HELP", "add_what_and_where", "framework_named", "known_names", "model_and_cluster"]

MODEL_HELP: Final = "a name, or PATH.yaml[:NAME]"


def add_what_and_where(parser: ArgumentParser) -> _ArgumentGroup:
    """The options that `evenpipe estimate` and `evenpipe plan` both begin with."""
    group = parser.add_argument_group("what and where")
    group.add_argument("--model", required=True, metavar="NAME", help=MODEL_HELP)
    group.add_argument("--cluster", required=True, metavar="NAME", help="NODESxGPUS-NAME, or PATH.yaml[:NAME]")
    group.add_argument("--framework", metavar="NAME", help=f"{' | '.join(names('frameworks'))} (default: the model's)")
    return group


def model_and_cluster(arguments: Namespace) -> tuple[Model, Cluster]:
    """Those that are named. Raises UsageError."""
    return _named("--model", model, arguments.model), _named("--cluster", cluster, arguments.cluster)


def framework_named(arguments: Namespace) -> Framework | None:
    """None where none is. Raises UsageError."""
    return _named("--framework", framework, arguments.framework) if arguments.framework else None


def _named(option: str, find: Callable[[str], Any], name: str) -> Any:
    try:
        return find(name)
    except DescriptionError as error:
        raise UsageError(f"{option} {error}") from error


def known_names() -> str:
    """For the end of a command's help."""
    return (
        f"Models: {', '.join(names('models'))}. Clusters: {', '.join(names('clusters'))}; with a size: 4x8-a100-80gb."
    )
