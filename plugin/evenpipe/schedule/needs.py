"""What a schedule needs of an engine: read off its actions, and held against what an engine offers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.kinds import INPUT_GRADIENT, KINDS, OWN_ENDS, WEIGHT_GRADIENT
from evenpipe.schedule.known import find, own
from evenpipe.schedule.places import loop
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.spec import Need, Spec

__all__ = ["NEEDS", "check_needs", "check_offers", "needs_of", "offered"]

#: How each need is said.
NEEDS: Final[Mapping[Need, str]] = MappingProxyType(
    {
        "chunks": "several model chunks a stage",
        "vee": "model chunks that are not placed stage by stage",
        "split": "backwards in two halves",
        "groups": "groups of micro-batches",
        "stream": "batches without a flush between",
        "swap": "tensors swapped to host memory",
    }
)


def needs_of(schedule: Schedule) -> frozenset[Need]:
    """What an engine must offer to carry out this schedule."""
    return frozenset(_needs_of(schedule))


def _needs_of(schedule: Schedule) -> Iterator[Need]:
    kinds = schedule.table.letters
    if schedule.chunks > 1:
        yield "chunks"
    if schedule.places != loop(schedule.stages, schedule.chunks):
        yield "vee"
    if kinds & {INPUT_GRADIENT, WEIGHT_GRADIENT}:
        yield "split"
    if schedule.group_size > 1:
        yield "groups"
    of_batch = any(row.of_batch for row in KINDS.values() if row.letter in kinds)
    if schedule.batches > 1 or schedule.weight_versions > 1 or of_batch:
        yield "stream"
    if kinds & OWN_ENDS:
        yield "swap"


def check_needs(spec: Spec, schedule: Schedule) -> None:
    """Raises :class:`ScheduleError` if ``schedule``, made by ``spec``, needs what the latter does not say."""
    for missing in sorted(needs_of(schedule) - spec.needs - spec.needs_at_some):
        raise ScheduleError(f"schedule {spec.name}: needs {NEEDS[missing]}: its Spec has to name the need {missing!r}")


def offered(offers: frozenset[Need]) -> list[str]:
    """The package's own schedules that an engine with these ``offers`` carries out."""
    return [name for name in own() if find(name).needs <= offers]


def check_offers(spec: Spec, offers: frozenset[Need], engine: str) -> None:
    """Raises :class:`ScheduleError`, one line, if ``engine`` cannot carry the schedule out in a run."""
    missing = [words for need, words in NEEDS.items() if need in spec.needs - offers]
    if missing:
        raise ScheduleError(
            f"schedule={spec.name}: needs {' and '.join(missing)}, which {engine} does not offer: choose one of "
            f"{', '.join(offered(offers))}"
        )
    if "stream" in spec.needs and spec.update_follows is None:
        raise ScheduleError(f"schedule={spec.name}: ends with its last batch, and a run goes on: choose 2bw")
