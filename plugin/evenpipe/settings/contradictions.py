"""The table of EvenPipe's settings that contradict each other, whatever framework trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

from evenpipe.schedule import AUTO, SEARCHED, Spec
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.settings.spelling import Spelling

__all__ = ["CONTRADICTIONS", "CONTRADICTIONS_ON_CPU", "Contradiction", "contradiction_in", "one_group", "only_tuned"]


class Contradiction(NamedTuple):
    """A `setting` that `holds` says cannot be had with the others: what is wrong, and what to do.

    In both texts {group_size} stands for the setting's name and {group_size:auto} for the setting with that value
    ({bpipe:true} for true, {schedule:=} for that which is asked for), as the front end writes them.
    """

    setting: str
    holds: Callable[[EvenPipeConfig], bool]
    wrong: str
    remedy: str


def contradiction_in(config: EvenPipeConfig, spelling: Spelling, rows: Sequence[Contradiction]) -> str | None:
    """One line for the first of `rows` that holds: the setting with its value, what is wrong, what to do; or None."""
    names = {setting: _Mention(setting, getattr(config, setting), spelling) for setting in type(config).model_fields}
    for setting, holds, wrong, remedy in rows:
        if holds(config):
            head = spelling.head(setting, getattr(config, setting))
            return f"{head}: {wrong.format(**names)}: {remedy.format(**names)}"
    return None


def one_group(spec: Spec, group_size: int | Literal["auto"], micro_batches: int, spelling: Spelling) -> str | None:
    """Return one line where all micro-batches of a batch are one group, so that kFkB is GPipe; else None."""
    if "groups" not in spec.needs or spec.table is not None or group_size == "auto":
        return None
    if group_size < max(micro_batches, 2):
        return None
    return (
        f"{spelling.head('group_size', group_size)}: a batch has {micro_batches} micro-batches, which make one group: "
        f"{spec.name} then runs as gpipe, and holds as much: give less to have groups"
    )


class _Mention(NamedTuple):
    """A setting amid a text: `format` writes it, with the value that the specification gives."""

    setting: str
    asked: Any
    spelling: Spelling

    def __format__(self, value: str) -> str:
        given: Any = {"=": self.asked, "true": True, "": None}.get(value, value)
        return self.spelling.mention(self.setting, given)


def only_tuned(setting: str) -> Contradiction:
    """Return the row of a setting that only a tuned group size makes use of."""
    return Contradiction(
        setting,
        lambda config: getattr(config, setting) is not None and config.group_size != "auto",
        "only {group_size:auto} makes use of it",
        f"use that, or leave {{{setting}}} out",
    )


CONTRADICTIONS: Final = (
    Contradiction(
        "trace",
        lambda config: config.trace is not None and not config.active,
        "there is no EvenPipe schedule to trace",
        "add {schedule:1f1b} or {bpipe:true}",
    ),
    Contradiction(
        "trace_iteration",
        lambda config: config.trace_iteration is not None and config.trace is None,
        "nothing is traced without {trace}",
        "name its file",
    ),
    Contradiction(
        "group_size",
        lambda config: config.group_size != 1 and "groups" not in config.spec.needs,
        "only {schedule:kfkb} runs micro-batches in groups",
        "use it, or leave {group_size} out",
    ),
    Contradiction(
        "group_size",
        lambda config: config.group_size == "auto" and config.spec.table is not None,
        "a table is of one size, so that there is nothing to choose",
        "leave {group_size} out, or use {schedule:kfkb}",
    ),
    Contradiction(
        "retune_interval",
        lambda config: config.retune_interval is not None and (not config.measures or config.schedule == AUTO),
        "only {group_size:auto} and {schedule:searched} make use of it",
        "use one of them, or leave {retune_interval} out",
    ),
    Contradiction(
        "memory_gib",
        lambda config: config.memory_gib is not None and not config.measures and config.swap != "auto",
        "only {group_size:auto}, {schedule:searched}, {schedule:auto} and {swap:auto} make use of it",
        "use one of them, or leave {memory_gib} out",
    ),
    Contradiction(
        "one_version",
        lambda config: config.one_version and not config.delayed,
        "only {schedule:2bw} has two weight versions",
        "use that, or leave {one_version} out",
    ),
    Contradiction(
        "delay_correction",
        lambda config: config.delay_correction != "none" and not config.delayed,
        "only {schedule:2bw} has gradients that are a batch late",
        "use that, or leave {delay_correction} out",
    ),
    Contradiction(
        "pair_adjacent",
        lambda config: bool(config.pair_adjacent) and not config.bpipe,
        "only {bpipe:true} exchanges anything within a pair",
        "add that, or leave {pair_adjacent} out",
    ),
    Contradiction(
        "bpipe",
        lambda config: config.bpipe and config.schedule in (AUTO, SEARCHED),  # a table of that name may evict
        "{schedule:=} evicts to partners where it is faster than what else fits",
        "leave {bpipe} out",
    ),
    Contradiction(
        "bpipe",
        # Whether a table evicts is to be seen when it is built.
        lambda config: config.bpipe and config.spec.balanced is None and config.spec.table is None,
        "with {schedule:=} all stages hold the same, so there is nothing to level",
        "use 1f1b",
    ),
    Contradiction(
        "swap",
        lambda config: config.swap is not None and config.measures and config.schedule != SEARCHED,
        "{group_size:auto} and {schedule:auto} choose by the memory of micro-batches that stay on the device",
        "give {group_size} a number or {schedule} another name, or leave {swap} out",
    ),
    Contradiction(
        "swap",
        lambda config: config.swap not in (None, 1) and config.schedule == SEARCHED and config.measures,
        "with {schedule:=}, all that can leave of a micro-batch is swapped, where that is faster",
        "give {swap} a share of 1, or leave it out",
    ),
    Contradiction(
        "swap",
        lambda config: config.swap == "auto" and config.bpipe and config.spec.table is not None,
        "it finds what stages send to partners by itself, and a table is run as it is",
        "give {swap} a share, or leave {bpipe} out",
    ),
    Contradiction(
        "swap",
        lambda config: config.swap is not None and config.streams,
        "with {schedule:=} a stage keeps micro-batches from batch to batch, whose swaps are not supported",
        "use another schedule, or leave {swap} out",
    ),
    Contradiction(
        "trace",
        lambda config: config.trace is not None and config.bpipe and config.streams,
        "with {schedule:=} and {bpipe:true} partners are amid transfers between batches, where a trace begins",
        "leave one of them out",
    ),
)

#: What cannot be where there is no GPU, whose memory could be asked for.
CONTRADICTIONS_ON_CPU: Final = (
    Contradiction(
        "group_size",
        lambda config: config.group_size == "auto" and config.memory_gib is None,
        "how much memory it may use is not known on CPU",
        "give {memory_gib}",
    ),
    Contradiction(
        "swap",
        lambda config: config.swap == "auto" and config.memory_gib is None,
        "how much memory it may use is not known on CPU",
        "give {memory_gib}",
    ),
    Contradiction(
        "schedule",
        lambda config: "times" in config.spec.needs and config.memory_gib is None,
        "how much memory it may use is not known on CPU",
        "give {memory_gib}",
    ),
)
