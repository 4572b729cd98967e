"""``evenpipe fit``: the run that you have, made to fit and made fast, in the flags that you know."""

from __future__ import annotations

import math
import os
from argparse import REMAINDER, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import Any, Final, Literal, NamedTuple, get_args

from pydantic import BaseModel

from evenpipe.cli.estimate import show
from evenpipe.cli.parser import Commands, UsageError, add_command
from evenpipe.cli.plan import engine_of
from evenpipe.cli.run_estimate import expandable, in_megatron, smallest_cluster
from evenpipe.cli.shown import console_of, print_table
from evenpipe.cli.values import gibibytes
from evenpipe.planner.arguments import FlagError, known_flags
from evenpipe.planner.descriptions import Cluster, DescriptionError, cluster, framework
from evenpipe.planner.fit.answers import Answers, Asked, answers, by_evenpipe
from evenpipe.planner.fit.moves import NARROWER, SHORT, Aspect, changed, modules_of
from evenpipe.planner.fit.weighing import Weighing
from evenpipe.planner.run import EstimateError, Module, Run
from evenpipe.planner.search.search import EQUAL, Planned
from evenpipe.planner.uncertainty import Uncertainty
from evenpipe.recipes.edits import edited, flag_changes
from evenpipe.recipes.line import Line, read_line
from evenpipe.recipes.megatron import Described, described_by
from evenpipe.recipes.megatron_rules import starts
from evenpipe.recipes.recipe import RecipeError
from evenpipe.settings.spelling import in_flags
from evenpipe.wording.nearest import nearest

__all__ = ["add_to", "fit_schedule"]

_CLUSTER: Final = "a100-80gb"
#: Tokens of a vocabulary of which no flag says the size: Llama 3's.
_VOCABULARY: Final = 128_256
_TITLES: Final = {
    "least": "least change that fits",
    "stock": "fastest with Megatron's schedules",
    "evenpipe": "fastest with EvenPipe's",
    "sized": "fastest with the same t, p, c and e",
    "narrower": "fastest with fewer bits",
}
#: Aspects whose changes leave every bit of losses and weights as it was.
_SAME_BITS: Final = frozenset(("allocator", "overlap", "recompute", "schedule"))
_GIB: Final = 2**30
#: Similarity of a flag and what it is a slip of: a letter or two differ.
_SLIP: Final = 0.94


class Changed(BaseModel):
    """One answer: what it needs and takes, whether losses stay, and the line that starts it with what is changed.

    names: of the answer, or of several that are the same. memory_gib: of the fullest stage. warnings: of memory.
    """

    names: list[str]
    memory_gib: float
    iteration_ms: float
    tokens_per_second_per_gpu: float
    uncertainty: dict[str, float | str | None]
    loss: str
    warnings: list[str]
    added: list[str]
    removed: list[str]
    command: list[str]


class Document(BaseModel):
    """The document of ``--json``. now: an ``evenpipe.estimate/1`` of the run as it is."""

    format: Literal["evenpipe.fit/1"] = "evenpipe.fit/1"
    now: dict[str, Any]
    answers: list[Changed]
    notes: list[str]


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    parser = add_command(
        commands,
        "fit",
        usage="evenpipe fit [--cluster NAME] [--memory-gib X] [--keep NAME,...] [--write RUN.sh [--take NAME]] "
        "[--json] -- [torchrun ...] pretrain_gpt.py [FLAGS ...]",
        beyond="the run's own line goes behind --",
        epilog="--json prints a document evenpipe.fit/1: now (an evenpipe.estimate/1), answers, and notes.",
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="NODESxGPUS-NAME, or PATH.yaml[:NAME][@NODESxGPUS]; without sizes, those of torchrun, or as few GPUs as "
        f"the flags need (default {_CLUSTER})",
    )
    parser.add_argument("--memory-gib", type=gibibytes, metavar="X", help="memory of a GPU (default: all that it has)")
    parser.add_argument(
        "--keep",
        type=_kept,
        default=frozenset(),
        metavar="NAME,...",
        help=f"what stays as it is: {', '.join(SHORT)}",
    )
    parser.add_argument("--write", type=Path, metavar="RUN.sh", help="write the changed line as a script, a new file")
    parser.add_argument(
        "--take", choices=_TITLES, help="the answer to write (default: least if the run does not fit, else the fastest)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument("line", nargs=REMAINDER, metavar="LINE", help="the line that starts the run today")
    parser.set_defaults(run=_run)


def _kept(text: str) -> frozenset[Aspect]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SHORT:
            raise ArgumentTypeError(f"{name!r} is nothing to keep, {nearest(name, SHORT)}")
    return frozenset(SHORT[name] for name in names)


class _Read(NamedTuple):
    """A line that was read, its run and cluster, and notes of what was assumed."""

    line: Line
    found: Described
    cluster: Cluster
    notes: list[str]


def fit_schedule(line: Sequence[str], on: str | None) -> None:
    """Print what `fit` says of a run's line, on this cluster, if nothing but its schedule may change."""
    keep = frozenset(get_args(Aspect)) - {"schedule"}
    _run(Namespace(line=line, cluster=on, memory_gib=None, keep=keep, write=None, take=None, json=False))


def _run(arguments: Namespace) -> None:
    read = _read(arguments)
    if arguments.write is not None and not read.line.before:
        raise UsageError("--write: which launcher? Give the whole line, such as torchrun ... pretrain_gpt.py <flags>")
    if arguments.write is not None and arguments.write.exists():
        raise UsageError(f"--write {arguments.write}: is there already: name a new file")
    if arguments.take is not None and arguments.write is None:
        raise UsageError("--take: says which answer --write writes: add that, or leave it out")
    try:
        asked, notes = _asked(read, arguments.keep)
        with _progress() as step:
            found = answers(replace(asked, step=step))
    except EstimateError as error:
        raise UsageError(in_megatron(in_flags(error))) from error
    shown = _answers(found, read, asked.run)
    notes = [*read.notes, *notes, *_of_gain(found, shown)]
    if arguments.json:
        _print_json(found, shown, notes)
    else:
        show(found.now.estimate, read.found.model, read.cluster, False, in_megatron)
        _print(found, shown, notes)
    if arguments.write is not None:
        _write(arguments, found, shown)


def _read(arguments: Namespace) -> _Read:
    words = arguments.line[1:] if arguments.line[:1] == ["--"] else arguments.line
    line = read_line(words)
    if line is None:
        raise UsageError(
            "no script: give the line that starts the run, such as -- torchrun ... pretrain_gpt.py <flags>"
        )
    if line.of_deepspeed:
        raise UsageError(
            f"{line.script}: its flags are DeepSpeed's, which do not say what the model is: `evenpipe plan`"
        )
    try:
        nodes, notes = _cluster(arguments, line)
        given = line.variable("PYTORCH_CUDA_ALLOC_CONF") or line.variable("PYTORCH_ALLOC_CONF") or ""
        segments = expandable() or "expandable_segments:true" in given.lower()
        name = PurePath(line.script).name
        found = described_by(line.flags, name, "bert" not in name.lower(), nodes.gpus, _VOCABULARY, segments)
    except (DescriptionError, FlagError, RecipeError) as error:
        raise UsageError(in_megatron(str(error))) from error
    if not any(word.partition("=")[0] in ("--vocab-size", "--padded-vocab-size") for word in line.flags):
        notes.append(f"no --vocab-size: taken for {_VOCABULARY:,} tokens")
    notes.extend(found.ignored)
    if found.unread:
        names = " ".join(_unread(word.partition("=")[0]) for word in found.unread)
        notes.append(f"not read, so that what they change is not in these estimates: {names}")
    return _Read(line, found, nodes, notes)


def _unread(flag: str) -> str:
    """Return the flag, with a known one that differs by a slip only."""
    close = get_close_matches(flag, known_flags(), n=1, cutoff=_SLIP)
    return f"{flag} (did you mean {close[0]}?)" if close else flag


def _cluster(arguments: Namespace, line: Line) -> tuple[Cluster, list[str]]:
    """Return what is named; without sizes, what the launcher says of them, else as few nodes as the flags need."""
    try:
        named = cluster(arguments.cluster or _CLUSTER)
        notes = [] if arguments.cluster else [f"no --cluster: taken for {_CLUSTER}"]
        if (
            named.nodes == 1
            and not (arguments.cluster or "")[:1].isdigit()
            and ".yaml" not in (arguments.cluster or "")
        ):
            name = arguments.cluster or _CLUSTER
            sizes = _sizes(line)
            if sizes:
                named = cluster(f"{sizes[0]}x{sizes[1]}-{name}")
            else:
                named = cluster(smallest_cluster(name, named.gpus_per_node, line.flags))
                notes.append(f"as few GPUs as the flags need: name --cluster {named.name}, or another size")
    except DescriptionError as error:
        raise UsageError(f"--cluster {error}") from error
    started = _started(line)
    if started and started != named.gpus:
        notes.append(f"the line starts {started} processes, but {named.name} has {named.gpus} GPUs: change one of them")
    if arguments.memory_gib is not None:
        device = named.device.model_copy(update={"memory_gib": arguments.memory_gib})
        named = named.model_copy(update={"device": device})
    return named, notes


def _sizes(line: Line) -> list[str]:
    """Return how many nodes and processes a node the launcher starts; nothing if it does not say so in numbers."""
    sizes = [_option(line.before, *names) for names in (("--nnodes",), ("--nproc-per-node", "--nproc_per_node"))]
    return sizes if all(size.isdecimal() and int(size) for size in sizes) else []


def _started(line: Line) -> int:
    return math.prod(map(int, _sizes(line) or ["0"]))


def _option(words: Sequence[str], *names: str) -> str:
    """Return the value of a launcher's option; 1 for nodes that it does not name."""
    for number, word in enumerate(words):
        name, sign, value = word.partition("=")
        if name in names:
            return value if sign else "".join(words[number + 1 : number + 2])
    return "1" if names == ("--nnodes",) else ""


def _asked(read: _Read, keep: frozenset[Aspect]) -> tuple[Asked, list[str]]:
    of = framework("megatron")
    line, model = read.line, read.found.model
    run = read.found.run.of(of)
    grouped = any(word == "--moe-grouped-gemm" for word in line.flags)
    schedules, bpipe, notes = _of_evenpipe(line, run)

    def flags(new: Run) -> int:
        return flag_changes(line, edited(line, model, run, new, os.environ))

    weighing = Weighing(model, read.cluster, of, lambda one: one == run or starts(one))
    # Without Transformer Engine, Megatron carries out no other module again than attention's core.
    local = _option(line.flags, "--transformer-impl") == "local"
    modules: tuple[Module, ...] = ("core_attn",) if local else modules_of(model, run, grouped)
    return Asked(weighing, run, engine_of(of), keep, flags, modules, schedules, bpipe), notes


def _of_evenpipe(line: Line, run: Run) -> tuple[tuple[str, ...], bool, list[str]]:
    """Return EvenPipe's schedules that go together with the flags, whether BPipe does, and why others do not."""
    from evenpipe.megatron.unsupported import refused_in_a_v, refused_settings

    given = Namespace(save=None, load=None)
    for number, word in enumerate(line.flags):
        name, sign, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            values = [value] if sign else line.flags[number + 1 : number + 2]
            setattr(given, name.replace("-", "_"), next((one for one in values if not one.startswith("--")), True))
    for refusal in refused_settings(given, False):
        return (), False, [f"without EvenPipe's schedules: {refusal.setting} {refusal.reason}"]
    if run.overlap_experts:
        return ("1f1b", "interleaved"), not any(refused_settings(given, True)), []
    halves = not any(refused_settings(given, False, True))
    vees = halves and not any(refused_in_a_v(given))
    found = ("1f1b", "interleaved", "kfkb", *["zb-h1"] * halves, *["v-half", "zbv"] * vees)
    return found, not any(refused_settings(given, True)), []


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield what says, on a terminal, what is looked for."""
    with console_of(stderr=True).status("fit: reads the run") as status:
        yield lambda what: status.update(f"fit: looks for {what}")


def _answers(found: Answers, read: _Read, run: Run) -> list[Changed]:
    """Return each run once, with all names that it has; of a run that fits, only those that are faster by 2 %."""
    now = found.now.estimate
    limit = now.iteration_ms / EQUAL if now.fits else float("inf")
    names: dict[Run, list[str]] = {}
    planned: dict[Run, Planned] = {}
    for name in _TITLES:
        one: Planned | None = getattr(found, name)
        if one is not None and one.estimate.iteration_ms < limit:
            names.setdefault(one.run, []).append(name)
            planned[one.run] = one
    return [_changed(planned[new], names[new], read, run) for new in names]


def _changed(one: Planned, names: list[str], read: _Read, run: Run) -> Changed:
    line = edited(read.line, read.found.model, run, one.run, os.environ)
    before, after = (_words(each) for each in (read.line, line))
    return Changed(
        names=names,
        memory_gib=one.most_bytes / _GIB,
        iteration_ms=one.estimate.iteration_ms,
        tokens_per_second_per_gpu=one.estimate.tokens_per_second,
        uncertainty=one.estimate.uncertainty._asdict(),
        warnings=[line for line in map(in_megatron, one.estimate.warnings) if line.startswith("memory pressure")],
        loss=_loss(read, run, one.run),
        added=[word for word in after if word not in before],
        removed=[word for word in before if word not in after],
        command=[*line.before, line.script, *line.flags],
    )


def _words(line: Line) -> list[str]:
    """Return variables, how EvenPipe is started, and each flag with its values."""
    through = ["-m evenpipe run"] * ("evenpipe" in line.before)
    return [*(word for word in line.before if "=" in word), *through, *(flag.strip() for flag in line.lines[1:])]


def _loss(read: _Read, old: Run, new: Run) -> str:
    aspects = changed(old, new)
    if aspects & NARROWER:
        return "fewer bits"
    if aspects <= _SAME_BITS:
        return "same bits"
    return "other dropout" if read.found.model.dropout else "rounding"


def _of_gain(found: Answers, shown: Sequence[Changed]) -> list[str]:
    """Return what is left to say where an answer is not there."""
    if not shown:
        return ["nothing to gain: no other run that fits is faster by more than 2 %"]
    if found.stock is not None and found.evenpipe is None and not by_evenpipe(found.now.run):
        return ["EvenPipe's schedules gain less than 2 % over Megatron's: leave them out"]
    return []


def _print(found: Answers, shown: Sequence[Changed], notes: Sequence[str]) -> None:
    console = console_of()
    now = found.now.estimate
    rows = [
        _row(0, "as it is", found.now.most_bytes / _GIB, now.tokens_per_second, now.iteration_ms, now.uncertainty, "")
    ]
    for number, one in enumerate(shown, 1):
        title = ", ".join(_TITLES[name] for name in one.names)
        sure = Uncertainty(**one.uncertainty)  # type: ignore[arg-type]
        rows.append(
            _row(number, title, one.memory_gib, one.tokens_per_second_per_gpu, one.iteration_ms, sure, one.loss)
        )
    heads = ("", "", "GiB", "tokens/s/GPU", "ms", "interval", "loss")
    print_table(
        console, heads, rows, "GiB: of the fullest stage; ms, interval: of an iteration", optional=("interval",)
    )
    for number, one in enumerate(shown, 1):
        console.print(f"{number}", style="bold")
        for sign, words in (("-", one.removed), ("+", one.added)):
            for word in words:
                console.print(f"  {sign} {word}", soft_wrap=True)
        for line in one.warnings:
            console.print(f"  {line}", soft_wrap=True)
    for note in notes:
        console.print(note, soft_wrap=True)


def _row(number: int, title: str, gib: float, tokens: float, ms: float, sure: Uncertainty, loss: str) -> list[str]:
    return [str(number), title, f"{gib:.1f}", f"{tokens:,.0f}", f"{ms:,.0f}", str(sure), loss]


def _print_json(found: Answers, shown: Sequence[Changed], notes: Sequence[str]) -> None:
    now = found.now.estimate.to_json()
    print(Document(now=now, answers=list(shown), notes=list(notes)).model_dump_json())


def _write(arguments: Namespace, found: Answers, shown: Sequence[Changed]) -> None:
    """Write the answer that is taken as a script, which nothing is written over."""
    alike = [one for one in shown if one.names != ["narrower"]] or shown
    fastest = min(alike, key=lambda one: one.iteration_ms, default=None)
    name = arguments.take or ("least" if found.least is not None else fastest.names[0] if fastest else "")
    one = next((one for one in shown if name in one.names), None)
    if one is None:
        have = ", ".join(name for one in shown for name in one.names) or "nothing to gain, so nothing to write"
        raise UsageError(f"{f'--take {name}' if name else '--write'}: no such answer here: {have}")
    line = read_line(one.command)
    assert line is not None
    text = "#!/bin/bash\n" + " \\\n".join(line.lines) + "\n"
    try:
        with open(arguments.write, "x", encoding="utf-8") as file:
            file.write(text)
        arguments.write.chmod(0o755)
    except OSError as error:
        raise UsageError(f"--write {arguments.write}: {error.strerror}: name a new file that can be written") from error
