"""The schedules that are known: one file each with its ``SPEC``, and those of other packages' entry points."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules

from evenpipe.schedule.actions import ScheduleError
from evenpipe.schedule.spec import Spec

__all__ = ["GROUP", "SEARCHED", "find", "names", "own"]

#: The entry point group under which another package's schedules are found: ``name = "package.module:SPEC"``.
GROUP = "evenpipe.schedules"

#: The schedule that is made for the times of a run.
SEARCHED = "searched"


@cache
def _own() -> dict[str, Spec]:
    modules = (import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__))
    specs: list[Spec] = sorted((module.SPEC for module in modules), key=lambda spec: (len(spec.needs), spec.name))
    return {spec.name: spec for spec in specs}


@cache
def _others() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _own()}


def own() -> tuple[str, ...]:
    """Return the package's own schedules that are the same in every run, those first that ask least of an engine."""
    return tuple(name for name, spec in _own().items() if "times" not in spec.needs)


def names() -> tuple[str, ...]:
    """Return :func:`own` and other packages' schedules, of which this imports nothing."""
    return (*own(), *_others())


def find(name: str) -> Spec:
    """Return the schedule of that name.

    Raises :class:`ScheduleError`, one line, if there is none, with what may have been meant, or if another package's
    cannot be had.
    """
    if name in _own():
        return _own()[name]
    if name not in _others():
        close = difflib.get_close_matches(name, (*_own(), *_others()), n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(names())}"
        raise ScheduleError(f"schedule={name}: unknown schedule, {hint}")
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
