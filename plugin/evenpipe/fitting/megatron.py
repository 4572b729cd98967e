"""The answers to a run that was read: what each needs and takes, and what it changes, as flags and as settings."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from evenpipe.descriptions import framework
from evenpipe.fitting.answers import Answers, Asked, answers, by_evenpipe
from evenpipe.fitting.document import (
    NOTHING_TO_GAIN,
    SAME_BITS,
    TITLES,
    Answer,
    Fit,
    FitError,
    Found,
    gaining,
    settings_of_run,
)
from evenpipe.fitting.moves import NARROWER, Aspect, changed, modules_of, offloadable
from evenpipe.fitting.source import Source, kept, option, source_of_line, source_of_settings
from evenpipe.fitting.weighing import Weighing
from evenpipe.planner.arguments import parse_flags
from evenpipe.planner.run import EstimateError, Module, Run
from evenpipe.planner.search.question import Engine
from evenpipe.planner.search.search import Planned
from evenpipe.planner.searched_order import searched_gib
from evenpipe.recipes.edits import edited, flag_changes
from evenpipe.recipes.line import Line
from evenpipe.recipes.megatron import settings_of, starts
from evenpipe.recipes.provider import field_of
from evenpipe.recipes.surroundings import in_megatron
from evenpipe.schedule import SEARCHED
from evenpipe.settings.spelling import FLAGS, flag, in_flags
from evenpipe.train.engines import ENGINES

__all__ = ["answered", "fit"]

_GIB: Final = 2**30


def fit(run: Any, *, cluster: str | None = None, memory_gib: float | None = None, keep: Collection[str] = ()) -> Fit:
    """Return what to change of a run so that it fits its GPUs and is fast, as ``evenpipe fit`` prints it.

    run: the words of the line that starts it, ``["torchrun", ..., "pretrain_gpt.py", ...]``, or its settings: those of
    Megatron-Bridge's `ConfigContainer`, with the sections model, train, ddp and so on, or a mapping with the names of
    `TransformerConfig`, and seq_length, vocab_size and the batch sizes beside them. cluster: as ``--cluster`` has
    it; memory_gib: of a GPU; keep: what stays, as ``--keep`` names it.
    Nothing is trained and nothing changed. Raises `FitError`, a ValueError of one line.
    """
    if isinstance(run, str):
        raise FitError("run: give a line as a list of words: shlex.split(line)")
    in_words = isinstance(run, Sequence)
    if not (in_words or isinstance(run, Mapping) or hasattr(run, "__dict__")):
        raise FitError(f"run: {run!r} is no run: give a line as a list of words, or settings, such as a mapping")
    if memory_gib is not None and not 0 < memory_gib < math.inf:
        raise FitError(f"memory_gib: {memory_gib!r} is no amount of memory: give a finite number of GiB above 0")
    source = (source_of_line if in_words else source_of_settings)(run, cluster, memory_gib)
    return answered(source, kept(keep)).fit


def answered(source: Source, keep: frozenset[Aspect], step: Callable[[str], None] = lambda _: None) -> Found:
    """Return the answers to a run that was read. ``step`` is called with what is looked for. Raises FitError."""
    try:
        asked, notes = _asked(source, keep)
        found = answers(replace(asked, step=step))
    except EstimateError as error:
        raise FitError(in_megatron(in_flags(error))) from error
    written = gaining(found, TITLES, lambda new: _edited(source, asked.run, new))
    shown = [_answer(one, line, names, source, asked.run) for line, one, names in written]
    notes = [*source.notes, *notes, *_of_swaps(source, shown), *_of_gain(found, shown)]
    now = found.now.estimate.to_json()
    now |= {"reason": now["reason"] and in_megatron(now["reason"]), "warnings": [*map(in_megatron, now["warnings"])]}
    return Found(found, Fit(now=now, answers=shown, notes=notes))


def _asked(source: Source, keep: frozenset[Aspect]) -> tuple[Asked, list[str]]:
    of = framework("megatron")
    line, model = source.line, source.found.model
    run = source.found.run.of(of)
    grouped = any(word == "--moe-grouped-gemm" for word in line.flags)
    schedules, bpipe, notes = source.schedules(run)

    def flags(new: Run) -> int:
        return flag_changes(line, _edited(source, run, new))

    weighing = Weighing(model, source.cluster, of, lambda one: one == run or starts(one))
    # Without Transformer Engine, Megatron carries out no other module again than attention's core.
    local = option(line.flags, "--transformer-impl") == "local"
    modules: tuple[Module, ...] = ("core_attn",) if local else modules_of(model, run, grouped)
    engine = Engine("Megatron", ENGINES["evenpipe"].offers)
    # Nor does it offload inputs of modules then (`TransformerConfig`), nor beside these settings.
    moved_already = any(getattr(source.given, name, None) for name in ("cpu_offloading", "moe_paged_stash"))
    offloaded = () if local or moved_already or run.sharding or run.graphs else offloadable(model, run)
    searches = source.searches(schedules)
    return Asked(weighing, run, engine, keep, flags, modules, schedules, bpipe, offloaded, searches), notes


def _edited(source: Source, run: Run, new: Run) -> Line:
    """Return the line that starts another run; for one whose order is searched, with the memory for that."""
    line = edited(source.line, source.found.model, run, new, os.environ)
    if new.schedule != SEARCHED or run.schedule == SEARCHED:
        return line
    gib = f"{searched_gib(source.cluster.device):g}"
    return replace(line, flags=(*line.flags, flag("memory_gib"), gib))


def _answer(one: Planned, line: Line, names: list[str], source: Source, run: Run) -> Answer:
    before, after = (_words(each) for each in (source.line, line))
    return Answer(
        names=names,
        memory_gib=one.most_bytes / _GIB,
        iteration_ms=one.estimate.iteration_ms,
        tokens_per_second_per_gpu=one.estimate.tokens_per_second,
        uncertainty=one.estimate.uncertainty._asdict(),
        warnings=[*_warnings(one)],
        loss=_loss(source, run, one.run),
        added=[word for word in after if word not in before],
        removed=[word for word in before if word not in after],
        command=[*line.before, line.script, *line.flags],
        changes=_changes(source, line),
        environment=dict(word.split("=", 1) for word in line.before if "=" in word and word not in source.line.before),
        evenpipe=settings_of_run(one.run) if by_evenpipe(one.run) else {},
    )


def _warnings(one: Planned) -> Iterator[str]:
    yield from (line for line in map(in_megatron, one.estimate.warnings) if line.startswith("memory pressure"))
    if one.run.offload_modules:
        fraction = one.run.offload_fraction < 1
        yield f"--offload-modules: needs Megatron-LM {'0.19, for the fraction' if fraction else '0.16 or newer'}"


def _words(line: Line) -> list[str]:
    """Return variables, how EvenPipe is started, and each flag with its values."""
    through = ["-m evenpipe run"] * ("evenpipe" in line.before)
    return [*(word for word in line.before if "=" in word), *through, *(flag.strip() for flag in line.lines[1:])]


def _changes(source: Source, new: Line) -> dict[str, Any]:
    """Return what is changed of Megatron's arguments: None or False for one that is no longer given."""
    before, after = (vars(parse_flags(settings_of(line.flags)[1])[0]) for line in (source.line, new))
    found = {name: value for name, value in after.items() if name not in before or before[name] != value}
    found |= {name: False if value is True else None for name, value in before.items() if name not in after}
    if source.sections is None:
        return found
    return dict(field_of(name, value, source.sections) for name, value in found.items())


def _loss(source: Source, old: Run, new: Run) -> str:
    aspects = changed(old, new)
    if aspects & NARROWER:
        return "fewer bits"
    if aspects <= SAME_BITS:
        return "same bits"
    return "other dropout" if source.found.model.dropout else "rounding"


def _of_swaps(source: Source, shown: Sequence[Answer]) -> list[str]:
    """Return a note where the run swaps, which its estimate does not have, and answers do not."""
    swap = source.found.settings.swap
    return [] if swap is None or not shown else [f"{FLAGS.mention('swap', swap)}: left out of all answers"]


def _of_gain(found: Answers, shown: Sequence[Answer]) -> list[str]:
    """Return notes on answers that are missing: nothing is faster, or EvenPipe's schedules are not."""
    if not shown:
        return [NOTHING_TO_GAIN]
    if found.stock is not None and not any(one.evenpipe for one in shown) and not by_evenpipe(found.now.run):
        return ["EvenPipe's schedules gain less than 2 % over Megatron's: leave them out"]
    return []
