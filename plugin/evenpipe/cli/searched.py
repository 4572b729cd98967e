"""What a search may choose of: the options of `evenpipe plan` and `evenpipe recipe`, and the question that they ask."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from typing import get_args

from evenpipe.cli.parser import UsageError
from evenpipe.cli.plan_engine import engine_of
from evenpipe.cli.values import positive
from evenpipe.planner.descriptions import Cluster, Framework, Model, Precision
from evenpipe.planner.run import Attention, Run
from evenpipe.planner.search.question import Question
from evenpipe.schedule import ScheduleError, find, own

__all__ = ["SEARCHED", "add_search_options", "question_from"]

#: Options that fix something of the runs that are searched, as attributes.
SEARCHED = ("schedules", "tensor_parallel", "context_parallel", "stages", "micro_batch_size", "precision", "attention")


def add_search_options(parser: ArgumentParser, title: str, description: str | None = None) -> _ArgumentGroup:
    """In a group of their own."""
    group = parser.add_argument_group(title, description)
    group.add_argument("--schedules", type=_names, metavar="NAME,NAME", help=" | ".join(own()))
    group.add_argument("--no-bpipe", dest="bpipe", action="store_false", help="no run with BPipe")
    late = "also schedules whose gradients are a batch late (2bw), compared by the time to the same loss"
    group.add_argument("--delayed", action="store_true", help=late)
    group.add_argument("--tensor-parallel", "--tensor", type=positive, metavar="T")
    group.add_argument("--context-parallel", "--context", type=positive, metavar="C")
    group.add_argument("--stages", "--pipeline", type=positive, metavar="P")
    group.add_argument("--micro-batch-size", "--micro-batch", type=positive, metavar="B")
    group.add_argument("--precision", choices=get_args(Precision))
    group.add_argument("--attention", choices=get_args(Attention))
    return group


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def question_from(
    arguments: Namespace, of: Model, nodes: Cluster, named: Framework, started_by: Framework | None = None
) -> Question:
    """For the framework; ``started_by``: whose engine carries the runs out, where that is another."""
    schedules = arguments.schedules or own()
    for name in schedules:
        try:
            find(name)
        except ScheduleError as error:
            raise UsageError(f"--schedules {str(error).removeprefix('schedule=')}") from error
    return Question(
        of,
        nodes,
        arguments.global_batch_size,
        engine_of(started_by or named),
        schedules,
        named,
        Run(global_batch=1, precision=arguments.precision, attention=arguments.attention),
        arguments.bpipe,
        arguments.delayed or bool(arguments.schedules),
        arguments.tensor_parallel,
        arguments.stages,
        arguments.micro_batch_size,
        arguments.context_parallel,
    )
