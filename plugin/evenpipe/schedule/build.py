"""From a schedule's specification and a size to a verified program: compute order, passes, proof."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final

from evenpipe.schedule.actions import Action
from evenpipe.schedule.bpipe import balance
from evenpipe.schedule.collector import without_cycle_collector
from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.known import find
from evenpipe.schedule.lower import Program
from evenpipe.schedule.needs import check_needs, needs_of
from evenpipe.schedule.order import Queues
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.spec import Size, Spec
from evenpipe.schedule.swaps import with_swaps
from evenpipe.schedule.verify import verify, verify_actions
from evenpipe.schedule.versions import with_updates

__all__ = ["Programs", "build", "choose"]


@without_cycle_collector()
def build(
    spec: Spec | str, size: Size, bpipe: bool = False, queues: Queues = "many", swaps: Collection[int] = ()
) -> Program:
    """The verified program of a schedule, given or named, for p stages and m micro-batches.

    ``queues``: see :class:`evenpipe.schedule.Program`. ``swaps``: the positions of the model's parts that swap
    tensors to their hosts and back (:func:`evenpipe.schedule.with_swaps`).

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
        if swaps:
            raise ScheduleError(f"swaps: the table of {spec.name} is run as it is: leave swaps out")
        return verify(spec.table, bpipe, queues)
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
    check_needs(spec, schedule)
    return verify(with_swaps(schedule, swaps), bpipe, queues)


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
        schedule = Schedule.parse(text_of_table)
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
    """What to carry out for each size: one schedule, with or without BPipe, built when it is first asked for.

    ``queues``, ``swaps``: see :func:`build`.
    """

    def __init__(
        self, spec: Spec | str, bpipe: bool = False, queues: Queues = "many", swaps: Collection[int] = ()
    ) -> None:
        self.spec = find(spec) if isinstance(spec, str) else spec
        self.bpipe = bpipe
        self.queues = queues
        self.swaps = swaps
        self._built: dict[Size, Program] = {}

    def for_queues(self, queues: Queues) -> Programs:
        """The same, for devices of that kind."""
        return self if queues == self.queues else Programs(self.spec, self.bpipe, queues, self.swaps)

    def __call__(self, size: Size) -> Program:
        """The verified program. Raises :class:`ScheduleError` as :func:`build` does."""
        if size not in self._built:
            chunked = self.spec.chunked if size.chunks > 1 else None
            self._built[size] = build(chunked or self.spec, size, self.bpipe, self.queues, self.swaps)
        return self._built[size]

    def keep(self, size: Size, program: Program) -> None:
        """From now on, this is the program for that size."""
        self._built[size] = program
