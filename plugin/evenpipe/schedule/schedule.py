"""A schedule: for each stage, which actions happen in which order.

An immutable value, and a text: EvenPipe's own format, and a grid that shows a fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from evenpipe.schedule.actions import EVICT, KINDS, Action, ScheduleError, parse
from evenpipe.schedule.table import Residency, Table, residency
from evenpipe.schedule.topology import Places, loop, parse_places

__all__ = ["DEFECT", "Fault", "Schedule", "fault_of", "format_grid", "marked"]


@dataclass(frozen=True)
class Schedule:
    """The actions of every stage in one batch, or, without a flush, in a stream of so many ``batches``.

    ``micro_batches`` are those of one batch; along a stream they are numbered on.
    ``bound`` is the promise that no stage ever holds more than so many live units (micro-batch × model chunk), own
    plus accepted, those in flight counted on both sides; ``bounds`` has one a stage, where they differ.
    ``group_size`` is kFkB's k: so many forwards, or backwards, in a row; interleaved ones go by it through
    the chunks (1: as many as there are stages); other schedules group nothing.
    ``weight_versions``: 1, or 2 where batches do not wait for the weights of the batch before (PipeDream-2BW). With 1
    and updates, a micro-batch's weights may change between its forward and its backward (PACI).
    ``places`` says where the model's parts are; chunk by chunk over the stages, if it is left out.
    ``recomputed``: the positions of parts that save their input only, and are computed again before their input
    gradient.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int
    bound: int
    actions: tuple[tuple[Action, ...], ...]
    batches: int = 1
    group_size: int = 1
    weight_versions: int = 1
    places: Places = field(default=None)  # type: ignore[assignment]
    recomputed: frozenset[int] = frozenset()
    bounds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.places is None:
            object.__setattr__(self, "places", loop(max(1, self.stages), max(1, self.chunks)))

    def __str__(self) -> str:
        """Return a head line and a line a stage: ``Schedule.parse(str(schedule)) == schedule``."""
        head = {name: getattr(self, name) for name in _HEAD}
        if self.recomputed:
            head[_RECOMPUTED] = ",".join(map(str, sorted(self.recomputed)))
        if self.bounds:
            head[_BOUNDS] = ",".join(map(str, self.bounds))
        rows = "\n".join(" ".join(map(str, row)) for row in self.actions)
        return " ".join([f"format={_FORMAT}", *(f"{key}={value}" for key, value in head.items())]) + f"\n{rows}\n"

    @classmethod
    def parse(cls, text: str | Iterable[str], *, name: str = "parsed", bound: int | None = None) -> Schedule:
        """Return the schedule that ``text`` denotes: a line of actions a stage, blank lines and those with # left out.

        Without a head line (see ``str``) the sizes are those that the actions show, in one batch, and ``name`` and
        ``bound`` those given, the bound else what it needs. Raises :class:`ScheduleError`: one line with its number.
        """
        lines = text.splitlines() if isinstance(text, str) else list(text)
        numbered = [(n, line.split()) for n, line in enumerate(lines, 1) if not line.lstrip().startswith("#")]
        if isinstance(text, str):
            numbered = [(n, words) for n, words in numbered if words]
        headed = bool(numbered) and bool(numbered[0][1]) and numbered[0][1][0].startswith("format=")
        actions = tuple(_row(words, n) for n, words in numbered[headed:])
        if headed:
            return _with_head(actions, *numbered[0])
        units = [action.unit for row in actions for action in row if not KINDS[action.kind].of_batch]
        micro_batches = 1 + max((unit.micro_batch for unit in units), default=-1)
        chunks = 1 + max((unit.chunk for unit in units), default=0)
        schedule = cls(name, len(actions), micro_batches, chunks, len(units), actions)
        return replace(schedule, bound=max(schedule.peak_live, default=0) if bound is None else bound)

    @cached_property
    def table(self) -> Table:
        """Its actions, as columns of numbers."""
        return Table(self.actions)

    @cached_property
    def evictions(self) -> tuple[int, ...]:
        """Per stage, how many units it evicts."""
        evicting = self.table.stage[self.table.kind == ord(EVICT)]
        return tuple(np.bincount(evicting, minlength=len(self.actions)).tolist())

    def recomputed_chunks(self, stage: int) -> frozenset[int]:
        """Return the model chunks of a stage that are computed again."""
        again = [self.places.order[position] for position in self.recomputed]
        return frozenset(place.chunk for place in again if place.stage == stage)

    def bound_of(self, stage: int) -> int:
        """Return the bound of one stage."""
        return self.bounds[stage] if self.bounds else self.bound

    @cached_property
    def residencies(self) -> tuple[Residency, ...]:
        """Per stage, what it holds on its way through its actions."""
        return tuple(residency(self.table, stage, self.bound_of(stage)) for stage in range(len(self.actions)))

    @property
    def peak_live(self) -> tuple[int, ...]:
        """Per stage, the most units live at once, own plus accepted, those in flight counted on both sides."""
        return tuple(held.peak for held in self.residencies)


_FORMAT = "evenpipe.schedule/1"
_NUMBERS = ("stages", "micro_batches", "chunks", "batches", "group_size", "weight_versions", "bound")
_HEAD = ("name", *_NUMBERS, "places")
_RECOMPUTED, _BOUNDS = "recomputed", "bounds"


def _row(words: Sequence[str], line: int) -> tuple[Action, ...]:
    try:
        return tuple(map(parse, words))
    except ValueError as error:
        raise ScheduleError(f"line {line}: {error}") from None


def _with_head(actions: tuple[tuple[Action, ...], ...], line: int, words: Sequence[str]) -> Schedule:
    """Return the schedule with these rows that the head line ``words`` describes."""
    keys = [word.partition("=")[0] for word in words]
    given = dict(word.partition("=")[::2] for word in words)
    recomputed, bounds = given.pop(_RECOMPUTED, None), given.pop(_BOUNDS, None)
    if given.pop("format") != _FORMAT:
        raise ScheduleError(f"line {line}: {words[0]}: expected format={_FORMAT}")
    wrong = [*sorted(set(given) ^ set(_HEAD)), *(key for key in keys if keys.count(key) > 1)]
    if wrong:
        raise ScheduleError(f"line {line}: {wrong[0]}: the head line has {', '.join(_HEAD)}, each once")
    for key in _NUMBERS:
        if not re.fullmatch("[1-9][0-9]{0,8}", given[key]):
            raise ScheduleError(f"line {line}: {key}={given[key]}: expected a number from 1 to 999999999")
    numbers = {key: int(given[key]) for key in _NUMBERS}
    if numbers["stages"] != len(actions):
        raise ScheduleError(
            f"line {line}: stages={numbers['stages']}: {len(actions)} rows of actions follow: give one for each stage"
        )
    if numbers["chunks"] > max(1, *map(len, actions)):
        raise ScheduleError(f"line {line}: chunks={numbers['chunks']}: more than a row has actions")
    name = "".join(letter for letter in given["name"] if letter.isprintable())  # it is shown on terminals
    places = parse_places(given["places"], numbers["stages"], numbers["chunks"])
    again = frozenset[int]()
    if recomputed is not None:
        if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", recomputed):
            raise ScheduleError(f"line {line}: {_RECOMPUTED}={recomputed}: expected positions of parts, such as 0,3")
        again = frozenset(map(int, recomputed.split(",")))
        if max(again) >= len(places.order):
            raise ScheduleError(
                f"line {line}: {_RECOMPUTED}={recomputed}: there are parts 0 to {len(places.order) - 1}"
            )
    of_stages: tuple[int, ...] = ()
    if bounds is not None:
        if not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*", bounds) or bounds.count(",") != len(actions) - 1:
            raise ScheduleError(f"line {line}: {_BOUNDS}={bounds}: expected a number from 1 a stage, such as 3,4")
        of_stages = tuple(map(int, bounds.split(",")))
        if max(of_stages) != numbers["bound"]:
            raise ScheduleError(f"line {line}: {_BOUNDS}={bounds}: the largest is not bound={numbers['bound']}")
    return Schedule(name, actions=actions, places=places, recomputed=again, bounds=of_stages, **numbers)


_WINDOW = 12  # steps shown either side of the marked one: a grid of thousands of steps helps nobody


def format_grid(schedule: Schedule, mark: tuple[int, int] | None = None) -> str:
    """One line a stage, one column a step; ``mark`` (stage, step) is shown as ``[F3]`` and its line pointed at."""
    first, last = 0, max((len(row) for row in schedule.actions), default=0)
    if mark is not None:
        first, last = max(0, mark[1] - _WINDOW), min(last, mark[1] + _WINDOW + 1)
    cells = [
        [f"[{a}]" if (stage, step) == mark else f" {a} " for step, a in enumerate(row[:last]) if step >= first]
        for stage, row in enumerate(schedule.actions)
    ]
    width = max((len(cell) for row in cells for cell in row), default=0)
    lines = ["step     " + " ".join(f"{step:^{width}}" for step in range(first, last))]
    for stage, row in enumerate(cells):
        pointer = "  <-- here" if mark is not None and stage == mark[0] else ""
        lines.append(f"stage {stage:<3}" + " ".join(f"{cell:<{width}}" for cell in row) + pointer)
    return "\n".join(line.rstrip() for line in lines)


#: What an error says that no input should cause.
DEFECT: Final = "this is a defect of evenpipe"


class Fault(Exception):
    """A defect of a schedule, and the step of one stage to point at."""

    def __init__(self, reason: str, stage: int, step: int) -> None:
        super().__init__(reason)
        self.mark = (stage, step)


def fault_of(schedule: Schedule, number: int, reason: str) -> Fault:
    """A fault of the action of that number."""
    stage = int(schedule.table.stage[number])
    step = number - schedule.table.of(stage).start
    return Fault(f"{schedule.actions[stage][step]} {reason}", stage, step)


@contextmanager
def marked(schedule: Schedule) -> Iterator[None]:
    """Makes a :class:`ScheduleError` of a fault."""
    try:
        yield
    except Fault as fault:
        stage, step = fault.mark
        grid = format_grid(schedule, fault.mark)
        raise ScheduleError(f"schedule {schedule.name}, stage {stage}, step {step}: {fault}\n{grid}") from None
