"""A run of Megatron's as it is read: from the line that starts it, or from a program's settings."""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile
from pathlib import PurePath
from typing import Any, Final

from evenpipe.descriptions import Cluster, DescriptionError, cluster
from evenpipe.fitting.document import FitError
from evenpipe.fitting.moves import SHORT, Aspect
from evenpipe.planner.arguments import FlagError, known_flags
from evenpipe.planner.run import EstimateError, Run
from evenpipe.recipes.line import Line, read_line
from evenpipe.recipes.megatron import Described, described_by
from evenpipe.recipes.provider import Settings, flags_of, settings_of
from evenpipe.recipes.recipe import RecipeError
from evenpipe.recipes.surroundings import expandable, in_megatron, smallest_cluster
from evenpipe.settings.spelling import in_flags
from evenpipe.wording.nearest import nearest

__all__ = ["Source", "kept", "option", "source_of_line", "source_of_settings"]

_CLUSTER: Final = "a100-80gb"
#: Tokens of a vocabulary whose size no flag gives: Llama 3's.
_VOCABULARY: Final = 128_256
_CAPTURED: Final = "CUDA graphs of Transformer Engine are captured in Megatron's order: no schedule with another order"
#: Flags that change neither memory nor time by much; and how others of that kind begin.
_NEUTRAL: Final = frozenset(
    (
        *("--moe-router-score-function", "--moe-router-enable-expert-bias", "--moe-router-topk-scaling-factor"),
        *("--moe-router-bias-update-rate", "--moe-router-pre-softmax", "--moe-z-loss-coeff", "--train-samples"),
        *("--manual-gc", "--manual-gc-interval", "--distributed-timeout-minutes", "--async-save", "--finetune"),
        *("--no-load-optim", "--no-load-rng", "--no-save-optim", "--no-mmap-bin-files", "--use-rope-scaling"),
        *("--no-create-attention-mask-in-dataloader", "--calculate-per-token-loss", "--exit-duration-in-mins"),
        *("--exit-interval", "--save-retain-interval", "--use-checkpoint-args", "--auto-detect-ckpt-format"),
        *("--glu-linear-offset", "--activation-func-clamp-value", "--softmax-type", "--te-rng-tracker"),
        *("--beta-fast", "--beta-slow", "--no-check-for-nan-in-loss-and-grad", "--rope-scaling-factor"),
        *("--adam-eps", "--data-cache-path", "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"),
        *("--trust-remote-code", "--no-one-logger", "--apply-layernorm-1p", "--rotary-seq-len-interpolation-factor"),
        *("--init-method-xavier-uniform", "--mscale", "--mscale-all-dim", "--rotary-scaling-factor"),
    )
)
_NEUTRAL_STARTS: Final = (
    *("--log-", "--tensorboard-", "--wandb-", "--dist-ckpt-", "--yarn-", "--lr-", "--muon-", "--eval-", "--train-data"),
    *("--valid-data", "--test-data", "--tiktoken-", "--tokenizer-", "--sft-tokenizer-", "--ckpt-", "--profile"),
    *("--rerun-", "--ft-", "--override-"),
)
#: What torchrun takes; with $ or ? only a shell, or who wrote a recipe, knows the number.
_UNKNOWN: Final = r".*[$?`].*"
_NODES: Final = re.compile(rf"0*[1-9]\d*(:0*[1-9]\d*)?|{_UNKNOWN}", re.ASCII)
_EACH: Final = re.compile(rf"0*[1-9]\d*|auto|[cghnx]pu|{_UNKNOWN}", re.ASCII)
#: The least similarity of a misspelt flag to the flag that was meant: a letter or two differ.
_SLIP: Final = 0.94


@dataclass(frozen=True)
class Source:
    """A run that was read, where it runs, and notes of what was assumed.

    line: for settings, the flags that say the same. ``given``: Megatron's arguments, or the settings, by name.
    ``sections``: whether settings were in sections; None for a line.
    """

    line: Line
    found: Described
    cluster: Cluster
    notes: tuple[str, ...]
    given: Namespace
    sections: bool | None = None

    @property
    def bridge(self) -> bool:
        """Return whether Megatron-Bridge makes the model's chunks, as it does for all settings."""
        return self.sections is not None

    def schedules(self, run: Run) -> tuple[tuple[str, ...], bool, list[str]]:
        """Return EvenPipe's schedules that go together with the run, whether BPipe does, and why others do not."""
        from evenpipe.megatron.unsupported import captures, refused_in_a_v, refused_settings  # which imports torch

        asked = self.found.settings
        for refusal in refused_settings(self.given, asked.bpipe, swaps=asked.swap is not None):
            if asked.active:
                raise FitError(f"EvenPipe's flags do not go with the others: {refusal.why}: {refusal.remedy}")
            why = f"{refusal.setting} {refusal.reason}" if self.bridge else refusal.why
            return (), False, [f"without EvenPipe's schedules: {why}"]
        bpipe = not any(refused_settings(self.given, True))
        if captures(self.given) is not None:  # in Megatron's order; nothing is captured there of two passes together
            return () if run.overlap_experts else ("1f1b", "interleaved"), bpipe, [_CAPTURED]
        vees = not self.bridge and not any(refused_in_a_v(self.given))
        if run.overlap_experts:
            return ("1f1b", "interleaved", *["dualpipev"] * vees), bpipe, []
        if self.bridge:  # which makes chunks, and layers with whole backwards, itself
            return ("1f1b", "interleaved", "kfkb"), bpipe, []
        halves = not any(refused_settings(self.given, False, True))
        return ("1f1b", "interleaved", "kfkb", *["zb-h1"] * halves, *["v-half", "zbv"] * (halves and vees)), bpipe, []

    def searches(self, schedules: Collection[str]) -> tuple[int, ...]:
        """Return the model chunks a stage with which a run may search an order, where it may have these schedules."""
        from evenpipe.megatron.unsupported import refused_with_search  # which imports torch

        if "zb-h1" not in schedules or any(refused_with_search(self.given)):
            return ()
        return (1, 2) if "zbv" in schedules else (1,)


def kept(names: Iterable[str]) -> frozenset[Aspect]:
    """Return the aspects of these names. Raises FitError for a name that is none."""
    found = list(names)
    for name in found:
        if name not in SHORT:
            raise FitError(f"{name!r} is nothing to keep, {nearest(name, SHORT)}")
    return frozenset(SHORT[name] for name in found)


def source_of_line(
    words: Sequence[str], on: str | Cluster | None, memory_gib: float | None, vocabulary: int | None = None
) -> Source:
    """Read the line that starts a script of Megatron-LM. Raises FitError.

    vocabulary: its tokens, where no flag says how many.
    """
    line = read_line(words)
    if line is None:
        raise FitError("no script: give the line that starts the run, such as -- torchrun ... pretrain_gpt.py <flags>")
    if line.of_deepspeed:
        raise FitError(f"{line.script}: is DeepSpeed's: `evenpipe fit ds_config.json` reads its configuration")
    given = Namespace(save=None, load=None)
    for number, word in enumerate(line.flags):
        name, sign, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            values = [value] if sign else [*takewhile(_is_value, line.flags[number + 1 :])]
            setattr(given, name.replace("-", "_"), True if not values else values if values[1:] else values[0])
    return _read(line, PurePath(line.script).name, on, memory_gib, given, None, vocabulary)


def _is_value(word: str) -> bool:
    return not word.startswith("--")


def source_of_settings(
    settings: Any, on: str | Cluster | None, memory_gib: float | None, name: str = "the settings"
) -> Source:
    """Read settings: a mapping, a `TransformerConfig`, or Bridge's `ConfigContainer` or provider. Raises FitError.

    name: of the file that has them, or what they are.
    """
    try:
        found = settings if isinstance(settings, Settings) else settings_of(settings)
        line = Line((), name, tuple(flags_of(found)))
    except FlagError as error:
        raise FitError(f"{name}: {error}") from None
    given = Namespace(**{"save": None, "load": None} | {str(key): value for key, value in found.values.items()})
    return _read(line, name, on, memory_gib, given, found.sections)


def _read(
    line: Line,
    name: str,
    on: str | Cluster | None,
    memory_gib: float | None,
    given: Namespace,
    sections: bool | None,
    vocabulary: int | None = None,
) -> Source:
    try:
        nodes, notes = _cluster(on, memory_gib, line)
        allocator = line.variable("PYTORCH_CUDA_ALLOC_CONF") or line.variable("PYTORCH_ALLOC_CONF") or ""
        segments = expandable(allocator)
        found = described_by(
            line.flags, name, "bert" not in name.lower(), nodes.gpus, vocabulary or _VOCABULARY, segments
        )
    except EstimateError as error:
        raise FitError(in_megatron(in_flags(error))) from error
    except (DescriptionError, FlagError, RecipeError) as error:
        wrong = in_megatron(str(error))
        if sections is not None and isinstance(error, DescriptionError):
            wrong = _in_keys(wrong)
        raise FitError(wrong if sections is None or name in wrong else f"{name}: {wrong}") from error
    said = {word.partition("=")[0] for word in line.flags}
    if vocabulary is None and not said & {"--vocab-size", "--padded-vocab-size"}:
        notes.append(f"no --vocab-size: taken for {_VOCABULARY:,} tokens")
    if sections is None:  # settings have values for all there is, of use or not
        notes.extend(found.ignored)
    if names := " ".join(filter(None, (_unread(word.partition("=")[0]) for word in found.unread))):
        notes.append(f"not read, so that what they change is not in these estimates: {names}")
    return Source(line, found, nodes, tuple(notes), given, sections)


def _in_keys(line: str) -> str:
    """Return the line with settings in place of the flags that say the same: hidden_size=64, not --hidden-size 64."""

    def key(found: re.Match[str]) -> str:
        return found[1].replace("-", "_") + "=" * bool(found[2])

    return re.sub(r"--([a-z][a-z-]*[a-z])( (?=[0-9]))?", key, line.removeprefix("the flags: "))


def _unread(flag: str) -> str:
    """Return the flag, followed by the known flag that it seems to misspell, if any; "" for one that changes little."""
    if close := get_close_matches(flag, known_flags(), n=1, cutoff=_SLIP):
        return f"{flag} (did you mean {close[0]}?)"
    return "" if flag in _NEUTRAL or flag.startswith(_NEUTRAL_STARTS) else flag


def _cluster(on: str | Cluster | None, memory_gib: float | None, line: Line) -> tuple[Cluster, list[str]]:
    """Return the cluster and notes. ``on``: a cluster or its name; A100s, if left out."""
    notes = [] if on else [f"no --cluster: taken for {_CLUSTER}"]
    try:
        named = on if isinstance(on, Cluster) else _named(on or _CLUSTER, line, notes)
    except DescriptionError as error:
        raise FitError(f"--cluster {error}") from error
    started = math.prod(map(int, _sizes(line) or ["0"]))
    if started and started != named.gpus:
        notes.append(f"the line starts {started} processes, but {named.name} has {named.gpus} GPUs: change one of them")
    if memory_gib is not None:
        device = named.device.model_copy(update={"memory_gib": memory_gib})
        named = named.model_copy(update={"device": device})
    return named, notes


def _named(name: str, line: Line, notes: list[str]) -> Cluster:
    """Return the named cluster; a name without sizes gets the launcher's, or else as few nodes as the flags need."""
    named = cluster(name)
    if named.nodes > 1 or name[:1].isdigit() or ".yaml" in name:
        return named
    if sizes := _sizes(line):
        return cluster(f"{sizes[0]}x{sizes[1]}-{name}")
    named = cluster(smallest_cluster(name, named.gpus_per_node, line.flags))
    notes.append(f"as few GPUs as the flags need: name --cluster {named.name}, or another size")
    return named


def _sizes(line: Line) -> list[str]:
    """Return how many nodes and processes a node the launcher starts; nothing if it does not say so in numbers.

    Raises FitError for a word that torchrun would refuse.
    """
    nodes = option(line.before, "--nnodes", default="1")
    each = option(line.before, "--nproc-per-node", "--nproc_per_node", default="auto")
    for name, size, may_be in (("--nnodes", nodes, _NODES), ("--nproc-per-node", each, _EACH)):
        if may_be.fullmatch(size) is None:
            words = "MIN:MAX" if may_be is _NODES else "auto, gpu or cpu"
            raise FitError(f"{name} {size}: is no number that torchrun takes: give a whole number above 0, or {words}")
    return [nodes, each] if nodes.isdecimal() and each.isdecimal() else []


def option(words: Sequence[str], *names: str, default: str = "") -> str:
    """Return the value of the first option of these `names` among the words; `default` where there is none."""
    for number, word in enumerate(words):
        name, sign, value = word.partition("=")
        if name in names:
            return value if sign else "".join(words[number + 1 : number + 2])
    return default
