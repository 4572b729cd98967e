"""A line that starts a script today, and the same line with EvenPipe in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Final

from evenpipe.planner.descriptions import Cluster, framework
from evenpipe.planner.estimate import Estimate, Estimator
from evenpipe.planner.features import of_megatron_s_schedules
from evenpipe.planner.run import EstimateError, Run
from evenpipe.recipes.line import Line, difference, read_line
from evenpipe.recipes.megatron import described_by
from evenpipe.recipes.recipe import RecipeError
from evenpipe.schedule import choose

__all__ = ["Converted", "convert", "line_of", "with_evenpipe"]

#: How much faster a schedule has to be than one with fewer flags.
_WORTH: Final = 0.005


@dataclass(frozen=True)
class Converted:
    """``before``, ``after``: estimates; None where nothing can be estimated of a script of DeepSpeed's."""

    old: Line
    new: Line
    before: Estimate | None = None
    after: Estimate | None = None

    @property
    def diff(self) -> list[str]:
        """As `diff -u` has it, a flag and its values a line."""
        return difference(self.old, self.new, ("now", "with EvenPipe"), 2)

    @property
    def command(self) -> str:
        """The new line, for a shell."""
        return self.new.command


def line_of(words: Sequence[str]) -> Line:
    """Raises RecipeError where no script can be found, or EvenPipe is in it already."""
    if "evenpipe" in words:
        raise RecipeError("--from-flags: EvenPipe is in this line already: add its flags behind the script")
    line = read_line(words)
    if line is None or not line.before:
        raise RecipeError(
            "--from-flags: names no script behind a launcher: give the whole line, such as "
            "torchrun --nproc-per-node 8 pretrain_gpt.py <flags>"
        )
    return line


def with_evenpipe(line: Line, flags: Sequence[str]) -> Line:
    """Return the line that runs the script through `evenpipe run`."""
    through = line.by_evenpipe()
    return replace(through, flags=(*line.flags, *flags))


def convert(line: Line, nodes: Cluster) -> Converted:
    """Return the fastest of EvenPipe's schedules that fits, everything else left as it is.

    Raises RecipeError, one line; FlagError and DescriptionError for flags that describe no run, EstimateError for a run
    that cannot be.
    """
    if line.of_deepspeed:
        return Converted(line, with_evenpipe(line, ()))
    name = PurePath(line.script).name
    expandable = any("expandable_segments:true" in word.lower() for word in line.before)
    found = described_by(line.flags, name, "bert" not in name.lower(), nodes.gpus, expandable=expandable)
    if found.settings.active:
        raise RecipeError(
            "--from-flags: EvenPipe's flags are in this line already: put `-m evenpipe run` before the script"
        )
    if flag := of_megatron_s_schedules(found.run):
        raise RecipeError(f"{flag}: EvenPipe's schedules run without it: leave it out")
    if found.run.stages < 2:
        raise RecipeError(
            "--pipeline-model-parallel-size 1: one stage is no pipeline: `evenpipe plan` says whether more would pay"
        )
    estimate = Estimator(found.model, nodes, framework("megatron"))
    now = estimate(found.run)
    best: tuple[float, Estimate, tuple[str, ...]] | None = None
    for flags, run in _schedules(found.run):
        try:
            shown = estimate(run)
        except EstimateError:
            continue
        if shown.fits and (best is None or shown.iteration_ms < best[0] * (1 - _WORTH)):
            best = shown.iteration_ms, shown, flags
    if best is None:
        shown = estimate(replace(found.run, schedule=found.run.spec.name, blocking=()))
        raise RecipeError(f"--from-flags: no schedule makes this run fit: {shown.reason}")
    return Converted(line, with_evenpipe(line, best[2]), now, best[1])


def _schedules(run: Run) -> Iterator[tuple[tuple[str, ...], Run]]:
    """Without and with BPipe, the fewest flags first; those with groups where stages are whole."""
    own = replace(run, schedule="1f1b", blocking=())
    named = ("--evenpipe-schedule", "1f1b")
    yield named, own
    levelled = own.spec.balanced is not None
    if levelled:
        yield ("--bpipe",), replace(own, bpipe=True)
    if run.chunks > 1:
        return
    for size in (2, 4):
        if run.micro_batches < size:
            continue
        grouped = replace(own, schedule="kfkb", group_size=size)
        flags = ("--evenpipe-schedule", "kfkb", "--group-size", str(size))
        yield flags, grouped
        if choose("kfkb").balanced is not None:
            yield (*flags, "--bpipe"), replace(grouped, bpipe=True)
