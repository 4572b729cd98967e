"""The section "evenpipe" of DeepSpeed's configuration, checked."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError

from evenpipe.schedule import Need, ScheduleError, check_offers
from evenpipe.settings.config import EvenPipeConfig, first_problem
from evenpipe.settings.contradictions import CONTRADICTIONS, contradiction_in, only_tuned
from evenpipe.settings.spelling import SECTION
from evenpipe.wording.nearest import nearest

__all__ = ["NAME", "OFFERS", "Section", "SectionError", "section_of", "with_deepspeeds_names"]

NAME: Final = "evenpipe"

# "auto", as in the rest of DeepSpeed's configuration: left to EvenPipe, like null.
_LEFT_TO_US: Final = frozenset(("partition", "pair_adjacent", "retune_interval", "memory_gib", "trace_iteration"))
#: What the engines here do beyond one forward and one backward at a time.
OFFERS: Final[frozenset[Need]] = frozenset(["groups", "split", "stream"])


class SectionError(ValueError):
    """A key of the section that cannot be, or cannot be together with the rest; one line that begins with its path.

    `path` is that within the section, "" for the section itself; None where `message` begins with it already.
    """

    def __init__(self, path: str | None, message: str) -> None:
        whole = f"{NAME}.{path}: {message}" if path else f"{NAME}: {message}"
        super().__init__(message if path is None else whole)


def with_deepspeeds_names(error: ScheduleError) -> str:
    """Return what a schedule cannot be, with the name that DeepSpeed's configuration has for what schedules count."""
    return str(error).replace("micro_batches=", "gradient_accumulation_steps=")


class Section(EvenPipeConfig):
    """EvenPipe's settings, and what only DeepSpeed has to be told."""

    partition: tuple[int, ...] | Path | None = Field(
        None,
        description="the layers at which stages begin, and the number of layers: [0, 3, 5, 8] are three stages of the "
        "layers 0-2, 3-4 and 5-7; or a plan of `evenpipe partition`, which cuts inside layers too (default: "
        "PipelineModule's partition_method)",
    )

    micro_batch_size: Literal["auto"] | None = Field(
        None,
        description="auto: with group_size auto, batches may be cut into micro-batches of another size, which trains "
        "the same if the loss is a mean over samples that count alike (default: train_micro_batch_size_per_gpu)",
    )

    @property
    def active(self) -> bool:
        """Always: a section, even an empty one, asks for EvenPipe's engine."""
        return True


def section_of(config: Mapping[str, Any]) -> Section | None:
    """Return the checked section of a DeepSpeed configuration; None where there is none. Raises SectionError."""
    if NAME not in config:
        _check_misspelt(config)
        return None
    given = config[NAME]
    if not isinstance(given, Mapping):
        raise SectionError("", f'must be an object, such as {{"schedule": "1f1b"}}, not {json.dumps(given)}')
    for key in given:
        _check_key(str(key))
    section = _under_its_plan(_validated(given))
    _check_together(section)
    return section


def _check_misspelt(config: Mapping[str, Any]) -> None:
    """DeepSpeed does not look at keys that it does not know."""
    close = difflib.get_close_matches(NAME, [key for key in config if isinstance(key, str)], n=1, cutoff=0.75)
    if close:
        raise SectionError("", f'the configuration has no such section, but "{close[0]}": rename it, or leave it out')


def _check_key(key: str) -> None:
    known = list(Section.model_fields)
    if key not in known:
        raise SectionError(key, f"unknown key, {nearest(key, known)}")


def _validated(given: Mapping[str, Any]) -> Section:
    """Types as JSON has them: "2" is no number, "yes" is no truth value; a dictionary's paths are strings there."""
    try:
        left = {key: None if value == "auto" and key in _LEFT_TO_US else value for key, value in given.items()}
        return Section.model_validate_json(json.dumps(left, default=str), strict=True)
    except ValidationError as error:
        (key, *places), wanted, wrong = first_problem(error)
        # A setting of several types has them in its path, behind the key and the places in a list.
        path = str(key) + "".join(f"[{place}]" for place in places if isinstance(place, int))
        raise SectionError(path, f"{json.dumps(wanted)}: {wrong}") from None


def _under_its_plan(section: Section) -> Section:
    """With the schedule that its plan is for, if it has one. Raises SectionError where it asks for another."""
    path = section.partition
    if not isinstance(path, Path):
        return section
    from evenpipe.partition.dawnpiper.problem import PartitionError
    from evenpipe.partition.search.plan import Plan

    try:
        plan = Plan.read(path)
        plan.check_trained()
    except PartitionError as error:
        raise SectionError("partition", str(error)) from None
    planned = {"schedule": plan.schedule, "bpipe": plan.bpipe, "group_size": plan.group_size}
    for setting, wanted in planned.items():
        given = getattr(section, setting)
        if setting in section.model_fields_set and given is not None and given != wanted:
            raise SectionError(
                "partition",
                f"{path}: is for {SECTION.mention(setting, wanted)}, not {SECTION.mention(setting, given)}: make a "
                f"plan for that, or leave {setting} out",
            )
    if plan.chunks > 1:
        raise SectionError(
            "partition",
            f"{path}: is for {plan.chunks} model chunks a stage, which DeepSpeed's engine does not offer: make a plan "
            "without --chunks",
        )
    return section.model_copy(update=planned)


def _check_together(section: Section) -> None:
    swap = None if section.swap == "auto" else section.swap
    try:
        check_offers(section.spec, OFFERS | {"times"}, "DeepSpeed's engine", swap)
    except ScheduleError as error:
        said = str(error).removeprefix(f"schedule={section.spec.name}")
        raise SectionError("schedule", json.dumps(section.schedule) + said) from None
    line = contradiction_in(section, SECTION, (*CONTRADICTIONS, only_tuned("micro_batch_size")))
    if line is not None:
        raise SectionError(None, line)
