"""``evenpipe fit``: the run that you have, made to fit and made fast, in the flags that you know."""

from __future__ import annotations

import json
import re
from argparse import REMAINDER, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

from evenpipe.cli.estimate import add_model, model_and_cluster, show
from evenpipe.cli.parser import Commands, UsageError, add_command
from evenpipe.cli.progress import Show, progress
from evenpipe.cli.shown import console_of, print_prose, print_table
from evenpipe.cli.values import gibibytes, positive
from evenpipe.cli.verbosity import say
from evenpipe.fitting import (
    TITLES,
    Answer,
    Fit,
    FitError,
    Found,
    Source,
    answered,
    is_file_of_a_run,
    kept,
    option,
    source_of_line,
    source_of_path,
)
from evenpipe.fitting.deepspeed import (
    ENGINE,
    NAMES,
    configuration_in,
    configured,
    fitted,
    in_deepspeed,
    no_configuration,
    with_changes,
)
from evenpipe.fitting.moves import SHORT, Aspect
from evenpipe.planner.uncertainty import Uncertainty
from evenpipe.recipes.line import read_line
from evenpipe.recipes.surroundings import in_megatron

__all__ = ["add_to", "fit_schedule"]

_GIB: Final = 2**30
#: Percent of the time before each step: a GPT of 48 layers on 32 H100, two cores, compiled searches in the cache.
_BEHIND: Final[Mapping[str, int]] = {
    "its sizes kept": 0,
    "the least change": 13,
    "Megatron's schedules": 15,
    "EvenPipe's schedules": 35,
    "an order of its own": 50,
    "fewer bits": 90,
}


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    parser = add_command(
        commands,
        "fit",
        usage="evenpipe fit [--cluster NAME] [--memory-gib X] [--keep NAME,...]"
        "\n                    [--write RUN.sh [--take NAME]] [--json]"
        "\n                    -- [torchrun ...] pretrain_gpt.py [FLAGS ...]\n"
        "       evenpipe fit [...] run_config.yaml|CHECKPOINT|RECIPE\n"
        "       evenpipe fit [...] --model NAME|--hf PATH --stages P ds_config.json\n"
        "       evenpipe fit [...] --model NAME|--hf PATH --stages P\n"
        "                    -- deepspeed train.py --deepspeed_config ds.json",
        beyond="the run's own line goes behind --; or a configuration that Megatron-Bridge saved, a recipe's folder, "
        "or DeepSpeed's JSON, with what it does not say of the run",
        epilog="--json prints a document evenpipe.fit/1: now (an evenpipe.estimate/1), answers, and notes.",
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="NODESxGPUS-NAME, or PATH.yaml[:NAME][@NODESxGPUS]; without sizes, those of torchrun, or as few GPUs as "
        "the flags need (default a100-80gb)",
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
        "--take",
        choices=tuple(TITLES),
        help="the answer to write (default: least if the run does not fit, else the fastest)",
    )
    group = parser.add_argument_group("what DeepSpeed's JSON does not say")
    add_model(group, required=False)
    group.add_argument("--stages", type=positive, metavar="P", help="of PipelineModule")
    group.add_argument("--tensor-parallel", type=positive, metavar="T", help="of its topology (default: 1)")
    group.add_argument(
        "--recompute",
        choices=ENGINE.scopes,
        help="full: PipelineModule(activation_checkpoint_interval=1), as it is today (default: none)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument("line", nargs=REMAINDER, metavar="LINE", help="the line that starts the run today")
    parser.set_defaults(run=_run)


def _kept(text: str) -> frozenset[Aspect]:
    try:
        return kept(name.strip() for name in text.split(","))
    except FitError as error:
        raise ArgumentTypeError(str(error)) from None


def fit_schedule(line: Sequence[str], on: str | None, as_json: bool) -> None:
    """Print what `fit` says of a run's line, on this cluster, if nothing but its schedule may change.

    Raises UsageError, also for a run of DeepSpeed's, whose JSON does not say what the model is.
    """
    keep = frozenset(get_args(Aspect)) - {"schedule"}
    words = _without_dashes(line)
    try:
        of_deepspeed = (path := _configuration(words)) is not None and configuration_in(path) is not None
    except FitError as error:
        raise UsageError(str(error)) from error
    if of_deepspeed:
        raise UsageError(f"--from-flags: {path} is DeepSpeed's, and has no flags: give it to evenpipe fit")
    _answer(Namespace(line=words, cluster=on, memory_gib=None, keep=keep, write=None, take=None, json=as_json))


#: Options of DeepSpeed's runs, as attributes.
_OF_DEEPSPEED: Final = ("model", "hf", "seq_length", "stages", "tensor_parallel", "recompute")


def _run(arguments: Namespace) -> None:
    words = arguments.line
    if words[1:] and words[1].startswith("-") and words[0].endswith((".json", ".yaml")):  # options behind the file
        arguments = arguments.parser.parse_args([*words[1:], words[0]], arguments)
    arguments.line = words = _without_dashes(arguments.line)
    try:
        if (path := _configuration(words)) is not None and (values := configuration_in(path)) is not None:
            _run_deepspeed(arguments, path, values)
            return
        given = [name for name in _OF_DEEPSPEED if getattr(arguments, name) is not None]
        if path is not None and (given or words[1:]):
            raise no_configuration(path)
    except FitError as error:
        raise UsageError(str(error)) from error
    if given:
        raise UsageError(f"--{given[0].replace('_', '-')}: is for DeepSpeed's JSON only: leave it out")
    _answer(arguments)


def _without_dashes(words: Sequence[str]) -> Sequence[str]:
    return words[1:] if words[:1] == ["--"] else words


def _answer(arguments: Namespace) -> None:
    """Print the answers to a run of Megatron's, and write one of them."""
    try:
        source = _source(arguments)
        _refuse(arguments, source)
        with progress("fit", "reads the run") as show_progress:
            found = answered(source, arguments.keep, _step(show_progress))
    except FitError as error:
        raise UsageError(str(error)) from error
    line = read_line(arguments.line)
    if line is not None and not Path(line.script).exists():
        say(f"{line.script}: there is no such file here: the answer is about its flags alone")
    if arguments.json:
        print(found.fit.model_dump_json())
    else:
        show(found.answers.now.estimate, source.found.model, source.cluster, False, in_megatron)
        _print(found, source.bridge)
    if arguments.write is not None:
        _write(arguments, found.fit)


def _configuration(words: Sequence[str]) -> Path | None:
    """Return the file of DeepSpeed's configuration that the words name; None where they may name another run."""
    line = read_line(words)
    if line is not None and (line.of_deepspeed or (line.by_deepspeed and not option(line.flags, "--num-layers"))):
        name = option(line.flags, "--deepspeed_config")
        if not name:
            raise FitError(
                f"{line.script}: --deepspeed_config: not given, and a script's own is not read: name the JSON"
            )
        return Path(name)
    return Path(words[0]) if len(words) == 1 and words[0].endswith(".json") else None


def _run_deepspeed(arguments: Namespace, path: Path, values: dict[str, Any]) -> None:
    """Print the answers to a configuration of DeepSpeed's, and write one of them."""
    if arguments.model is None and arguments.hf is None:
        raise UsageError(f"{path}: does not say what the model is: give --model NAME or --hf config.json")
    for name, said in (("stages", "the stages of PipelineModule are"), ("cluster", "the GPUs are")):
        if getattr(arguments, name) is None:
            raise UsageError(f"{path}: does not say what {said}: give --{name}")
    if arguments.take is not None and arguments.take not in NAMES:
        raise UsageError(f"--take {arguments.take}: DeepSpeed's answers are {', '.join(NAMES)}")
    _refuse_writing(arguments)
    of, nodes = model_and_cluster(arguments)
    if arguments.memory_gib is not None:
        nodes = nodes.model_copy(
            update={"device": nodes.device.model_copy(update={"memory_gib": arguments.memory_gib})}
        )
    with progress("fit", "reads the run") as show_progress:
        tensor, again = arguments.tensor_parallel or 1, arguments.recompute == "full"
        given = configured(values, path.name, of, nodes, arguments.stages, tensor, again)
        found = fitted(given, arguments.keep, _step(show_progress))
    if arguments.json:
        print(found.fit.model_dump_json())
    else:
        show(found.answers.now.estimate, of, nodes, False, in_deepspeed)
        _print(found, False, NAMES)
    if arguments.write is not None:
        if not (changes := _taken(arguments, found.fit).changes):
            raise UsageError("--write: this answer changes the script alone, no key: --take another")
        _write_text(arguments, with_changes(values, changes))


def _source(arguments: Namespace) -> Source:
    words = arguments.line
    if not words or not is_file_of_a_run(words[0]):
        if len(words) == 1 and not words[0].endswith(".py"):
            raise UsageError(
                f"{words[0]}: no such folder: name one that Bridge or `evenpipe recipe` wrote, or give the line that "
                "starts the run, such as -- torchrun ... pretrain_gpt.py <flags>"
            )
        return source_of_line(words, arguments.cluster, arguments.memory_gib)
    if words[1:]:
        raise UsageError(f"{words[1]}: behind {words[0]}, which has all that is read: leave it out")
    return source_of_path(Path(words[0]), arguments.cluster, arguments.memory_gib)


def _refuse(arguments: Namespace, source: Source) -> None:
    if arguments.write is not None and source.bridge:
        raise UsageError("--write: no line starts a configuration: --json has the fields to change")
    if arguments.write is not None and not source.line.before:
        raise UsageError("--write: which launcher? Give the whole line, such as torchrun ... pretrain_gpt.py <flags>")
    _refuse_writing(arguments)


def _refuse_writing(arguments: Namespace) -> None:
    if arguments.write is not None and arguments.write.exists():
        raise UsageError(f"--write {arguments.write}: is there already: name a new file")
    if arguments.take is not None and arguments.write is None:
        raise UsageError("--take: says which answer --write writes: add that, or leave it out")


def _step(show: Show) -> Callable[[str], None]:
    """Return what shows each step, and how many of a hundred parts of the time are behind it, where that is known."""
    return lambda what: show(f"looks for {what}", _BEHIND.get(what, 0), 100 * (what in _BEHIND))


def _print(found: Found, bridge: bool, titles: Mapping[str, str] = TITLES) -> None:
    console = console_of()
    now, shown = found.answers.now.estimate, found.fit.answers
    rows = [
        _row(
            0,
            "as it is",
            found.answers.now.most_bytes / _GIB,
            now.tokens_per_second,
            now.iteration_ms,
            now.uncertainty,
            "",
        )
    ]
    for number, one in enumerate(shown, 1):
        title = ", ".join(titles[name] for name in one.names)
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
        for line in _changes(one, bridge):
            console.print("\n".join(_wrapped(f"  {line}", console.width)), soft_wrap=True)
        for line in one.warnings:
            print_prose(console, f"  {line}")
    for note in found.fit.notes:
        print_prose(console, note)


def _changes(one: Answer, bridge: bool) -> list[str]:
    """Return the flags and variables that go and come; of a configuration, its fields as they are to be."""
    if not bridge:
        return [f"{sign} {word}" for sign, words in (("-", one.removed), ("+", one.added)) for word in words]
    given = ", ".join(f"{name}={value!r}" for name, value in one.evenpipe.items())
    fields = [f"{name} = {json.dumps(value)}" for name, value in one.changes.items()]
    variables = [f"{name}={value}" for name, value in one.environment.items()]
    return [*variables, *fields, *[f"callbacks = [EvenPipe({given})]"] * bool(given)]


_WORD: Final = re.compile(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+""")


def _wrapped(text: str, width: int) -> Iterator[str]:
    """Yield a change in lines of at most ``width``, which a shell joins again: each but the last ends with a backslash.

    A quoted word that is longer than a line goes on at the start of the next one, between quotes of its own.
    """
    line = ""
    for word in _WORD.findall(text):
        if line and len(line) + len(word) + 3 > width and line.split()[-1] not in "+-":
            yield f"{line} \\"
            line = "     "
        line = f"{line} {word}" if line else f"  {word}"
        while len(line) > width and line.endswith("'") and "|" in line[: width - 2]:
            at = line.rindex("|", 0, width - 2) + 1
            yield f"{line[:at]}'\\"
            line = f"'{line[at:]}"
    yield line


def _row(number: int, title: str, gib: float, tokens: float, ms: float, sure: Uncertainty, loss: str) -> list[str]:
    return [str(number), title, f"{gib:.1f}", f"{tokens:,.0f}", f"{ms:,.0f}", str(sure), loss]


def _write(arguments: Namespace, fit: Fit) -> None:
    """Write the answer that is taken as a script."""
    line = read_line(_taken(arguments, fit).command)
    assert line is not None
    _write_text(arguments, "#!/bin/bash\n" + " \\\n".join(line.lines) + "\n")
    arguments.write.chmod(0o755)


def _taken(arguments: Namespace, fit: Fit) -> Answer:
    one = fit.answer(arguments.take)
    if one is None:
        have = ", ".join(name for one in fit.answers for name in one.names) or "nothing to gain, so nothing to write"
        raise UsageError(f"{f'--take {arguments.take}' if arguments.take else '--write'}: no such answer here: {have}")
    return one


def _write_text(arguments: Namespace, text: str) -> None:
    """Write a new file; nothing is written over."""
    try:
        with open(arguments.write, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--write {arguments.write}: {error.strerror}: name a new file that can be written") from error
