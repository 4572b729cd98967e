"""``evenpipe plan``: what to run on a cluster: the fastest runs that fit, and why not others."""

from __future__ import annotations

import shlex
from argparse import Namespace

from evenpipe.cli.commands import add_command
from evenpipe.cli.described import add_what_and_where, framework_named, known_names, model_and_cluster
from evenpipe.cli.options import write
from evenpipe.cli.parser import Commands, UsageError
from evenpipe.cli.plan_shown import drawn, show
from evenpipe.cli.searched import add_search_options, question_from
from evenpipe.cli.values import output_file, picture_file, positive, sample_count
from evenpipe.planner.descriptions import DescriptionError
from evenpipe.planner.estimate import framework_of
from evenpipe.planner.run import EstimateError
from evenpipe.planner.search.plan import plan_of
from evenpipe.planner.search.question import Question
from evenpipe.planner.search.search import search
from evenpipe.report.files import write_atomically
from evenpipe.report.front import draw_front
from evenpipe.settings.spelling import in_flags

__all__ = ["add_to"]


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    document = (
        "--json prints a document evenpipe.plan/1: plans, the fastest first, the Pareto front of memory against speed, "
        "and why families of runs are rejected. "
        f"{known_names()}"
    )
    parser = add_command(commands, "plan", epilog=document)
    group = add_what_and_where(parser)
    group.add_argument(
        *("--global-batch-size", "--global-batch"),
        type=sample_count,
        required=True,
        metavar="G",
        help="samples of an iteration; where replicas do not divide them, as many as do: never more",
    )
    add_search_options(parser, "what it may choose of", "all that the framework runs, where nothing is said")
    group = parser.add_argument_group("output")
    group.add_argument("--top", type=positive, default=5, metavar="N", help="how many runs to show (default 5)")
    group.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    group.add_argument("--out", type=output_file, metavar="PLAN.json", help="write the document")
    group.add_argument(
        "--picture", type=picture_file, metavar="P.png", help="draw memory against speed, and the front, as a PNG"
    )
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> None:
    try:
        question = _question(arguments)
        found = search(question, arguments.top)
    except DescriptionError as error:
        raise UsageError(str(error)) from error
    except EstimateError as error:
        raise UsageError(in_flags(error)) from error
    plan = plan_of(question, found)
    document = plan.model_dump_json()
    write("--out", arguments.out, lambda path: write_atomically(path, document + "\n"))
    write("--picture", arguments.picture, lambda path: draw_front(path, drawn(plan, question, found)))
    if arguments.json:
        print(document)
    else:
        words = ["--model", arguments.model, "--cluster", arguments.cluster]
        words += ["--framework", arguments.framework] if arguments.framework else []
        show(plan, f"evenpipe estimate {shlex.join(words)}")


def _question(arguments: Namespace) -> Question:
    of, nodes = model_and_cluster(arguments)
    return question_from(arguments, of, nodes, framework_named(arguments) or framework_of(of, nodes))
