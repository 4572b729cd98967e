"""``evenpipe candidates``: which group sizes and micro-batch sizes of kFkB fit into memory."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Final

from evenpipe.cli.parser import Commands, RunFailed, UsageError, add_command
from evenpipe.cli.progress import progress
from evenpipe.cli.shown import console_of, in_runs, print_prose, print_table
from evenpipe.cli.training import add_fields, options_from
from evenpipe.cli.values import gibibytes, picture_file, sample_count, write
from evenpipe.planner.divisors import divisors
from evenpipe.report.figures import Limit, draw_limit
from evenpipe.schedule import Programs
from evenpipe.train.machine import PlannedRun, ProfileError, stage_memory
from evenpipe.train.options import TrainOptions
from evenpipe.tuner.group_memory import PlanError, StageMemory, candidates, peak_bytes
from evenpipe.tuner.grouped import Candidate, GroupedSchedule
from evenpipe.upstream.installed import has_module

__all__ = ["add_to"]

_GIB: Final = 2**30
#: Fields of TrainOptions that memory depends on.
_MODEL: Final = (
    *("model", "layers", "hidden", "heads", "seq_length", "untie_embeddings", "dropout"),
    *("data_parallel", "tensor_parallel", "precision", "optimizer", "momentum", "distributed_optimizer"),
    *("bpipe", "recompute"),
)


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    document = (
        "For each k: the largest b that fits on every stage. --json prints a document evenpipe.candidates/1: "
        "the candidates with k, b, m (micro-batches of a replica's batch) and peak_bytes of one process of each stage."
    )
    parser = add_command(commands, "candidates", epilog=document)
    group = parser.add_argument_group("plan")
    group.add_argument("--stages", required=True, metavar="P", help="pipeline stages")
    group.add_argument(
        "--global-batch-size",
        required=True,
        type=sample_count,
        metavar="G",
        help="samples of all replicas in an iteration",
    )
    group.add_argument("--memory-gib", required=True, type=gibibytes, metavar="X", help="what one process may hold")
    group.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where it is to run: on CPU dropout's masks are larger (default: where evenpipe train would run here)",
    )
    add_fields(parser.add_argument_group("model", "as evenpipe train takes it"), _MODEL)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    group.add_argument("--picture", type=picture_file, metavar="P.png", help="draw the memory-limit curve as a PNG")
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> None:
    options, samples = _plan(arguments)
    schedule = GroupedSchedule(Programs("kfkb", options.bpipe), options.stages)
    with progress("candidates", "profiles the model, in a process of its own") as show:
        memory = _profile(options, arguments.device)
        show("looks for groups that fit")
        try:
            found = candidates(memory, samples, int(arguments.memory_gib * _GIB), schedule)
        except PlanError as error:
            raise UsageError(f"--memory-gib {arguments.memory_gib:g}: {error}") from error
        peaks = []
        for done, candidate in enumerate(found):
            show("peaks of each stage", done, len(found))
            peaks.append(peak_bytes(memory, candidate, schedule))
    title = f"{options.model}, {options.stages} stages, {samples} samples a replica, {arguments.memory_gib:g} GiB"
    title += ", BPipe" if options.bpipe else ""
    if arguments.picture:
        limit = _limit(title, memory, samples, arguments.memory_gib, schedule, found)
        write("--picture", arguments.picture, lambda path: draw_limit(path, limit))
    if arguments.json:
        print(json.dumps(_document(found, peaks)))
        return
    console = console_of()
    print_prose(console, title, "bold")
    print_table(
        console, ("k", "b", "m", "peak GiB", "of each stage"), _rows(found, peaks), "×: so many stages in a row"
    )


def _plan(arguments: Namespace) -> tuple[TrainOptions, int]:
    """Return the checked options, and a replica's samples in an iteration."""
    options = options_from(arguments, PlannedRun, (*_MODEL, "stages"))
    if options.stages == 1:
        raise UsageError("--stages 1: one stage is no pipeline: use at least 2")
    samples, replicas = arguments.global_batch_size, options.data_parallel
    if samples % replicas:
        raise UsageError(
            f"--global-batch-size {samples}: not divisible by --data-parallel {replicas}: "
            f"make it a multiple of {replicas}"
        )
    return options, samples // replicas


def _profile(options: TrainOptions, device: str | None) -> tuple[StageMemory, ...]:
    if not has_module("megatron.core"):
        raise UsageError("megatron-core is not installed: pip install 'evenpipe[megatron]'")
    try:
        return stage_memory(options, device)
    except ProfileError as error:
        raise RunFailed(str(error), error.details) from None


def _document(found: Sequence[Candidate], peaks: Sequence[tuple[int, ...]]) -> dict[str, object]:
    listed = [
        {**candidate._asdict(), "peak_bytes": list(stages)} for candidate, stages in zip(found, peaks, strict=True)
    ]
    return {"format": "evenpipe.candidates/1", "candidates": listed}


def _rows(found: Sequence[Candidate], peaks: Sequence[tuple[int, ...]]) -> Iterator[Sequence[str]]:
    for candidate, stages in zip(found, peaks, strict=True):
        each = in_runs(f"{peak / _GIB:.4g}" for peak in stages)
        yield *map(str, candidate), f"{max(stages) / _GIB:.4g}", each


def _limit(
    title: str,
    memory: Sequence[StageMemory],
    samples: int,
    limit_gib: float,
    schedule: GroupedSchedule,
    found: Sequence[Candidate],
) -> Limit:
    """Return every (k, b) up to one step beyond the candidates."""
    sizes = divisors(samples)
    sizes = sizes[: sizes.index(found[0].b) + 2]
    points = [Candidate(k, b, samples // b) for k in range(1, len(found) + 2) for b in sizes]
    peaks = {(point.k, point.b): max(peak_bytes(memory, point, schedule)) / _GIB for point in points}
    return Limit(title, samples, peaks, limit_gib, {(candidate.k, candidate.b) for candidate in found})
