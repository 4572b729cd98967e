"""``evenpipe train``: train a GPT or BERT, of megatron-core or of plain modules, under a schedule, and measure it."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace

from evenpipe.cli.options import add_output_options, title_of, write_reports
from evenpipe.cli.parser import Commands, UsageError, add_command
from evenpipe.cli.shown import console_of, print_table
from evenpipe.cli.train_planned import COMPARED, compared
from evenpipe.cli.training import add_fields, options_from, run_training
from evenpipe.cli.values import output_file, write
from evenpipe.report.files import write_atomically
from evenpipe.report.log_line import median_ms
from evenpipe.report.timeline import StageMemory, Timeline
from evenpipe.schedule import choose
from evenpipe.settings.contradictions import one_group
from evenpipe.settings.spelling import COMMAND
from evenpipe.simulate import Simulation
from evenpipe.train import checkpoint, data
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.predict import last_program, predict, predicted_peaks, run_document
from evenpipe.train.result import RunResult

__all__ = ["add_to"]

_MIB = 2**20


def add_to(commands: Commands) -> None:
    """Add the sub-command: a flag for every field of TrainOptions."""
    parser = add_command(commands, "train")
    add_fields(parser.add_argument_group("run"), TrainOptions.model_fields)
    add_output_options(parser)
    parser.add_argument(
        "--out", type=output_file, metavar="RUN.json", help="write the JSON document, for `evenpipe report`"
    )
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> None:
    options = options_from(arguments, TrainOptions, TrainOptions.model_fields)
    try:
        data.load(options)
        checkpoint.check(options)
    except OptionsError as error:
        raise UsageError(str(error)) from error
    if (line := one_group(choose(options.schedule), options.group_size, options.micro_batches, COMMAND)) is not None:
        print(f"evenpipe train: warning: {line}", file=sys.stderr)
    [result] = run_training("train", [options], [f"{options.engine}, {options.schedule}"])
    program = last_program(options, result)
    prediction = predict(program, result)
    title = title_of(replace(program.schedule, batches=1), options.bpipe)
    title += f" of {result.retunes[-1].b}" if result.retunes else ""
    beside = compared(options, result) if options.partition is not None else None
    if beside is not None:
        title = f"{beside.plan.origin.model}: {title}"
        write("--picture", arguments.picture, lambda path: beside.draw(path, title))
        arguments.picture = None
    _write_reports(arguments, result, prediction, title)
    document = run_document(title, options, program, result, prediction)
    if beside is not None:
        for stage, both in zip(document["stages"], beside.document(), strict=True):
            stage |= both
    write("--out", arguments.out, lambda path: write_atomically(path, json.dumps(document) + "\n"))
    if arguments.json:
        print(json.dumps(document))
        return
    console = console_of()
    if beside is not None:
        console.print(f"{title}, on random data", style="bold")
        print_table(console, COMPARED, beside.rows(), _caption(result))
        return
    console.print(f"{options.model}, {title}, engine {options.engine}", style="bold")
    heads = ("stage", "peak live", "peak saved MiB", "predicted MiB", "evicted MiB", "parameters MiB")
    print_table(console, heads, _rows(result, prediction), _caption(result), optional=heads[-2:])


def _write_reports(arguments: Namespace, result: RunResult, prediction: Simulation, title: str) -> None:
    measured = Timeline(f"{title}: measured", result.spans)
    predicted = Timeline.of(prediction, f"{title}: predicted from its median times")
    peaks = StageMemory(
        "peak of saved activations",
        "MiB",
        tuple(peak / _MIB for peak in predicted_peaks(prediction, result)),
        tuple(stage.peak_saved_bytes / _MIB for stage in result.stages),
    )
    write_reports(arguments, [predicted, measured], peaks)


def _caption(result: RunResult) -> str:
    caption = (
        f"loss {result.losses[0]:.4f} to {result.losses[-1]:.4f} ({result.losses[-1].hex()}), "
        f"weights {result.weights_sha256[:16]}, {median_ms(result.iteration_ms):,.0f} ms an iteration"
    )
    if result.retunes:
        chosen = ", ".join(f"k={one.k} b={one.b} from iteration {one.iteration + 1}" for one in result.retunes)
        caption += f"; {chosen}"
    skipped = len(result.skipped_iterations)
    caption += f", {skipped} steps skipped" if skipped else ""
    if result.weight_versions_peak > 1:
        versions = " ".join(f"{stage.weight_version_bytes / _MIB:,.2f}" for stage in result.stages)
        held = " ".join(f"{stage.held_gradient_bytes / _MIB:,.2f}" for stage in result.stages)
        caption += f"; second weight version MiB {versions}, held gradients MiB {held}"
    return caption


def _rows(result: RunResult, prediction: Simulation) -> Iterator[Sequence[str]]:
    predicted_bytes = predicted_peaks(prediction, result)
    for number, (stage, predicted) in enumerate(zip(result.stages, predicted_bytes, strict=True)):
        yield (
            str(number),
            str(stage.peak_live),
            f"{stage.peak_saved_bytes / _MIB:,.2f}",
            f"{predicted / _MIB:,.2f}",
            f"{stage.evicted_bytes / _MIB:,.2f}",
            f"{stage.parameter_bytes / _MIB:,.2f}",
        )
