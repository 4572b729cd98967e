"""``evenpipe costs``: the times of a model's parts, out of the trace of a run, for a schedule that is made for them."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from evenpipe.cli.parser import Commands, UsageError, add_command
from evenpipe.cli.shown import console_of, print_table
from evenpipe.cli.values import above_zero, duration_ms, output_file, write
from evenpipe.order_search.costs import FORMAT, RunCosts
from evenpipe.report.files import write_atomically
from evenpipe.schedule import ScheduleError
from evenpipe.settings.spelling import in_flags

__all__ = ["add_to"]


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    epilog = (
        f"--out writes a document {FORMAT}: for `evenpipe schedule --schedule searched --costs`, and for `evenpipe "
        "simulate --costs` and `--front`."
    )
    parser = add_command(commands, "costs", epilog=epilog)
    parser.add_argument("trace", type=Path, metavar="T.json", help="what --evenpipe-trace, or --trace, wrote of a run")
    parser.add_argument(
        "--traced", choices=("loop", "vee"), default="vee", help="how that run placed its parts (default %(default)s)"
    )
    parser.add_argument(
        "--placement",
        choices=("straight", "loop", "vee"),
        default="vee",
        help="how they are to be placed (default %(default)s)",
    )
    parser.add_argument("--message-ms", type=duration_ms, default=0.0, metavar="T", help="of a message (default 0)")
    parser.add_argument(
        "--saved-bytes",
        type=_numbers,
        default=(1,),
        metavar="N[,N...]",
        help="what a micro-batch saves in a part: one, or one a part (default 1: memory counts parts)",
    )
    parser.add_argument(
        "--recomputed-bytes",
        type=_numbers,
        metavar="N[,N...]",
        help="what it leaves in a part that is computed again: one, or one a part (without it, none is)",
    )
    parser.add_argument(
        "--memory-bytes", type=_numbers, metavar="N[,N...]", help="what a stage may save: one, or one a stage"
    )
    parser.add_argument(
        "--peer-bytes-per-ms",
        type=above_zero,
        metavar="N",
        help="how fast a stage evicts to its partner (without it, nothing is evicted)",
    )
    parser.add_argument(
        "--host-bytes-per-ms",
        type=above_zero,
        metavar="N",
        help="how fast a stage copies to its host (without it, nothing is swapped)",
    )
    parser.add_argument("--out", type=output_file, metavar="COSTS.json", help="write the document")
    parser.add_argument("--json", action="store_true", help="print it")
    parser.set_defaults(run=_run)


def _numbers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 19 for word in words):
        raise ArgumentTypeError(f"{text!r}: give whole numbers of bytes, such as 1000000")
    return tuple(map(int, words))


def _run(arguments: Namespace) -> None:
    from evenpipe.report.traced_costs import costs_of_trace

    try:
        costs = costs_of_trace(
            arguments.trace,
            arguments.traced,
            arguments.placement,
            arguments.message_ms,
            arguments.saved_bytes,
            arguments.recomputed_bytes,
            arguments.memory_bytes,
            arguments.peer_bytes_per_ms,
            arguments.host_bytes_per_ms,
        )
    except ScheduleError as error:
        raise UsageError(in_flags(error).removeprefix("--trace ")) from error
    text = costs.model_dump_json(indent=1)
    write("--out", arguments.out, lambda path: write_atomically(path, text))
    if arguments.json:
        print(text)
        return
    heads = ("part", "forward ms", "input gradient ms", "weight gradient ms")
    print_table(console_of(), heads, _rows(costs))


def _rows(costs: RunCosts) -> Iterator[Sequence[str]]:
    for number, one in enumerate(costs.parts):
        times = one.forward_ms, one.input_gradient_ms, one.weight_gradient_ms
        yield str(number), *(f"{ms:,.4g}" for ms in times)
