"""From a schedule's specification and a size to a verified program, and what it needs of an engine.

Compute order, passes, proof: see :func:`build`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

from evenpipe.schedule.actions import INPUT_GRADIENT, KINDS, OWN_ENDS, WEIGHT_GRADIENT, Action, ScheduleError
from evenpipe.schedule.bpipe import balance
from evenpipe.schedule.known import AUTO, SEARCHED, find, own
from evenpipe.schedule.lower import Program
from evenpipe.schedule.order import Queues
from evenpipe.schedule.passes import Level, LevelsOfStages, Swaps, with_swaps, with_updates, with_updates_in_place
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.spec import Need, Size, Spec
from evenpipe.schedule.topology import loop
from evenpipe.schedule.verify import verify, verify_actions

__all__ = [
    "NEEDS",
    "Programs",
    "build",
    "check_offers",
    "choose",
    "fused_form",
    "needs_of",
    "offered",
    "without_cycle_collector",
]

#: How each need is said.
NEEDS: Final[Mapping[Need, str]] = MappingProxyType(
    {
        "chunks": "several model chunks a stage",
        "vee": "model chunks that are not placed stage by stage",
        "split": "backwards in two halves",
        "groups": "groups of micro-batches",
        "stream": "batches without a flush between",
        "in_place": "steps that each stage makes by itself, in place",
        "swap": "tensors swapped to host memory",
        "recompute": "parts of the model computed again",
        "times": "an order for the run's own times (`evenpipe schedule --schedule searched --costs COSTS.json --out "
        "S.txt` writes one, to be named as file:S.txt)",
    }
)


@contextmanager
def without_cycle_collector() -> Iterator[None]:
    """Pause it: schedules are millions of tuples without cycles, and walking them takes longer than making them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@without_cycle_collector()
def build(spec: Spec | str, size: Size, bpipe: bool = False, queues: Queues = "many", swaps: Swaps = ()) -> Program:
    r"""Return the verified program of a schedule, given or named, for p stages and m micro-batches.

    ``queues``: see :class:`evenpipe.schedule.Program`. ``swaps``: what swaps tensors to its host and back
    (:func:`evenpipe.schedule.with_swaps`): parts of the model by their positions, or :data:`Level`\ s.

    Raises :class:`ScheduleError` with one line that names the argument, for an unknown name, a size that cannot be, and
    ``bpipe`` where it has nothing to balance.
    """
    spec = find(spec) if isinstance(spec, str) else spec
    with _faults_of(spec):
        size = spec.fitted(size)
    if spec.table is not None:
        if bpipe != any(spec.table.evictions):
            evicts, remedy = ("nothing", "leave bpipe out") if bpipe else ("to partner stages", "add bpipe")
            raise ScheduleError(f"bpipe: the table of {spec.name} evicts {evicts}, and is run as it is: {remedy}")
        if not swaps:
            return verify(spec.table, bpipe, queues)
        levels = isinstance(swaps, LevelsOfStages) and "swap" not in spec.needs
        if not (levels or isinstance(swaps, str)):
            raise ScheduleError(f"swaps: the table of {spec.name} is run as it is: leave swaps out")
        return verify(with_swaps(spec.table, swaps), bpipe, queues)
    with _faults_of(spec):
        schedule = Schedule(
            spec.name,
            size.stages,
            size.micro_batches,
            size.chunks,
            spec.bound(size),
            tuple(map(tuple, spec.order(size))),
            size.batches,
            size.group_size,
            places=spec.places(size),
        )
        odd = next((action for row in schedule.actions for action in row if not isinstance(action, Action)), None)
        if odd is not None:
            raise TypeError(f"{odd!r} in its order is no Action")
    if any(schedule.evictions):
        raise ScheduleError(f"schedule={spec.name}: its order evicts to partner stages: leave that to bpipe")
    if bpipe:
        if spec.balanced is None:
            raise ScheduleError(f"bpipe: {spec.name} leaves nothing to balance between stages: leave bpipe out")
        if size.stages < 2:
            raise ScheduleError("bpipe: one stage has no partner to evict to; use at least 2 stages")
        verify_actions(schedule)
        schedule = balance(schedule, min(spec.balanced(size), schedule.bound), queues)
    update_follows = spec.update_follows
    if update_follows is not None:
        schedule = with_updates(schedule, lambda batch: update_follows(size, batch))
    elif "in_place" in spec.needs:
        schedule = with_updates_in_place(schedule)
    _check_needs(spec, schedule)
    return verify(with_swaps(schedule, swaps), bpipe, queues, spec.fused)


@contextmanager
def _faults_of(spec: Spec) -> Iterator[None]:
    """Makes a ScheduleError of whatever a specification's own functions raise: it may be another package's."""
    try:
        yield
    except ScheduleError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise ScheduleError(
            f"schedule={spec.name}: its Spec fails at this size ({type(error).__name__}: {said}): correct the package "
            "that brings it"
        ) from error


#: Of a table in a file; a million actions are a tenth of that.
_MOST_CHARACTERS: Final = 2**26


def choose(text: str) -> Spec:
    """The schedule that a user asks for: by its name, or as ``file:PATH``, as ``evenpipe schedule --out`` writes it.

    Raises :class:`ScheduleError`, one line, where there is none.
    """
    path = text.removeprefix("file:")
    if path == text:
        return find(text)
    try:
        with open(path, encoding="utf-8") as file:
            text_of_table = file.read(_MOST_CHARACTERS + 1)
        if len(text_of_table) > _MOST_CHARACTERS:
            raise ScheduleError(
                f"more than {_MOST_CHARACTERS:,} characters: name a file that `evenpipe schedule --out` wrote"
            )
        schedule = Schedule.parse(text_of_table, name="table")
        if not schedule.actions:
            raise ScheduleError("there is no schedule in it: name a file that `evenpipe schedule --out` wrote")
        # A size, and so a line, that is too wrong to be verified later is told with the file's name.
        verify(schedule)
    except (OSError, UnicodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "is no text"
        raise ScheduleError(f"schedule={text}: {said}: name a file that `evenpipe schedule --out` wrote") from None
    except ScheduleError as error:
        raise ScheduleError(f"schedule={text}: {error}") from None
    return Spec.of(schedule, needs_of(schedule))


class Programs:
    """The programs of one schedule, with or without BPipe: each size's is built when it is first asked for.

    ``queues``, ``swaps``: see :func:`build`.
    """

    def __init__(self, spec: Spec | str, bpipe: bool = False, queues: Queues = "many", swaps: Swaps = ()) -> None:
        self.spec = find(spec) if isinstance(spec, str) else spec
        self.bpipe = bpipe
        self.queues = queues
        self.swaps = swaps
        self._built: dict[Size, Program] = {}
        self._swapping: dict[Level | LevelsOfStages, Programs] = {}

    def for_queues(self, queues: Queues) -> Programs:
        """Return the same, for devices of that kind."""
        return self if queues == self.queues else Programs(self.spec, self.bpipe, queues, self.swaps)

    def swapping(self, swaps: Level | LevelsOfStages) -> Programs:
        """Return the same, with other swaps; the same object each time."""
        if swaps not in self._swapping:
            self._swapping[swaps] = Programs(self.spec, self.bpipe, self.queues, swaps)
        return self._swapping[swaps]

    def __call__(self, size: Size) -> Program:
        """Return the verified program. Raises :class:`ScheduleError` as :func:`build` does."""
        if size not in self._built:
            chunked = self.spec.chunked if size.chunks > 1 else None
            self._built[size] = build(chunked or self.spec, size, self.bpipe, self.queues, self.swaps)
        return self._built[size]

    def keep(self, size: Size, program: Program) -> None:
        """From now on, this is the program for that size."""
        self._built[size] = program


def fused_form(spec: Spec, chunks: int) -> Spec:
    """Return the schedule for stages of so many model chunks that compute forwards and backwards together.

    Raises :class:`ScheduleError`, one line, where it has no order for that.
    """
    found = find(spec.chunked) if spec.chunked is not None and chunks > 1 else spec
    if found.fused_form is None:
        those = ", ".join(name for name in own() if find(name).fused_form is not None)
        raise ScheduleError(
            f"schedule={spec.name}: has no order in which forwards and backwards are computed together: choose one of "
            f"{those}"
        )
    return found.fused_form


def needs_of(schedule: Schedule) -> frozenset[Need]:
    """Return what an engine must offer to carry out this schedule."""
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
    if of_batch and schedule.weight_versions == 1:
        yield "in_place"
    if kinds & OWN_ENDS:
        yield "swap"
    if schedule.recomputed:
        yield "recompute"


def _check_needs(spec: Spec, schedule: Schedule) -> None:
    """Raises :class:`ScheduleError` if ``schedule``, made by ``spec``, needs what the latter does not say."""
    for missing in sorted(needs_of(schedule) - spec.needs - spec.needs_at_some):
        raise ScheduleError(f"schedule {spec.name}: needs {NEEDS[missing]}: its Spec has to name the need {missing!r}")


def offered(offers: frozenset[Need]) -> list[str]:
    """Return the package's own schedules that an engine with these ``offers`` carries out."""
    return [name for name in (*own(), SEARCHED, AUTO) if find(name).needs <= offers]


def check_offers(spec: Spec, offers: frozenset[Need], engine: str, swap: float | None = None) -> None:
    """Raises :class:`ScheduleError`, one line, if ``engine`` cannot carry the schedule out in a run.

    ``swap``: the share of what micro-batches save that may go to hosts in the run, if any may.
    """
    if "swap" in spec.needs - offers and spec.table is not None:
        if swap is None:
            raise ScheduleError(f"schedule={spec.name}: swaps to hosts what can leave: have the run swap, a share of 1")
        offers = offers | {"swap"}
    missing = [words for need, words in NEEDS.items() if need in spec.needs - offers]
    if missing:
        raise ScheduleError(
            f"schedule={spec.name}: needs {' and '.join(missing)}, which {engine} does not offer: choose one of "
            f"{', '.join(offered(offers))}"
        )
    if "stream" in spec.needs and not spec.goes_on:
        raise ScheduleError(f"schedule={spec.name}: ends with its last batch, and a run goes on: choose 2bw")
