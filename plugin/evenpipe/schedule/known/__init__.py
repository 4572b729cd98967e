"""The schedules that are known: one file each with its ``SPEC``, and those of other packages' entry points."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Final

from evenpipe.schedule.actions import ScheduleError
from evenpipe.schedule.spec import Spec
from evenpipe.wording.nearest import nearest

__all__ = ["AUTO", "GROUP", "SEARCHED", "find", "names", "own"]

#: The entry point group under which another package's schedules are found: ``name = "package.module:SPEC"``.
GROUP = "evenpipe.schedules"

#: The schedule that is made for the times of a run.
SEARCHED = "searched"

#: The one that a run chooses for its own times.
AUTO = "auto"


#: The file of each: who trains by one imports no other.
_FILES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "1f1b": "one_forward_one_backward",
        "gpipe": "gpipe",
        "interleaved": "interleaved",
        "kfkb": "k_forward_k_backward",
        "2bw": "two_bw",
        "paci": "paci",
        "zb-h1": "zero_bubble_h1",
        "zb-h2": "zero_bubble_h2",
        "interleaved-zb": "interleaved_zero_bubble",
        "zbv": "zbv",
        "v-half": "v_half",
        "v-min": "v_min",
        "dualpipev": "dualpipev",
        SEARCHED: "searched",
        AUTO: "auto",
    }
)


@cache
def _of_file(name: str) -> Spec:
    spec: Spec = import_module(f"{__name__}.{_FILES[name]}").SPEC
    return spec


@cache
def _own() -> tuple[str, ...]:
    specs = sorted(map(_of_file, _FILES), key=lambda spec: (len(spec.needs), spec.name))
    return tuple(spec.name for spec in specs if "times" not in spec.needs)


@cache
def _others() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _FILES}


def own() -> tuple[str, ...]:
    """Return the package's own schedules that are the same in every run, those first that ask least of an engine."""
    return _own()


def names() -> tuple[str, ...]:
    """Return :func:`own` and other packages' schedules, of which this imports nothing."""
    return (*own(), *_others())


def find(name: str) -> Spec:
    """Return the schedule of that name.

    Raises :class:`ScheduleError`, one line, if there is none, with what may have been meant, or if another package's
    cannot be had.
    """
    if name in _FILES:
        return _of_file(name)
    if name not in _others():
        raise ScheduleError(f"schedule={name}: unknown schedule, {nearest(name, (*names(), SEARCHED, AUTO))}")
    point = _others()[name]
    try:
        spec = point.load()
    except Exception as error:
        said = next(iter(str(error).splitlines()), "")
        raise ScheduleError(
            f"schedule={name}: its entry point {point.value} cannot be loaded ({type(error).__name__}: {said}): mend "
            "or remove the package that brings it"
        ) from error
    if not isinstance(spec, Spec) or spec.name != name:
        raise ScheduleError(
            f"schedule={name}: its entry point {point.value} is no evenpipe.schedule.Spec of that name: correct the "
            "package that brings it"
        )
    return spec
