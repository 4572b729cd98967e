"""Specifications of schedules, one a file of ``known/``, the sizes they are made for, and orders that several share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from evenpipe.schedule.actions import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    ScheduleError,
    Unit,
)
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.topology import Places, loop

__all__ = ["DelayCorrection", "Drawing", "Need", "Size", "Spec", "alternate", "halved", "units"]

Need = Literal["chunks", "vee", "split", "groups", "stream", "in_place", "swap", "recompute", "times"]
#: What is done about gradients that are a batch late, under a schedule without flushes.
DelayCorrection = Literal["none", "error-feedback", "weight-prediction", "nesterov"]


#: Forwards of a program; a million takes minutes to verify, and about half a GiB.
_MOST_UNITS: Final = 1_000_000


class Size(NamedTuple):
    """p stages, m micro-batches a batch, v model chunks a stage, k micro-batches a group, batches without a flush."""

    stages: int
    micro_batches: int
    chunks: int = 1
    group_size: int = 1
    batches: int = 1


class Drawing(NamedTuple):
    """A schedule as its paper draws it: one line a stage; ``source`` is the figure. Tests compare."""

    size: Size
    rows: str
    source: str = ""
    bpipe: bool = False


@dataclass(frozen=True)
class Spec:
    """A schedule: its compute order for any size, and what it promises and asks for.

    order: each stage's compute actions. bound: the most live units (micro-batch × chunk) of any stage.
    balanced: the bound under BPipe; None where there is nothing to balance.
    chunks: fewest and most model chunks a stage (None: any number); a schedule with a fixed number takes no other.
    needs: what an engine must offer: "chunks" (several a stage), "vee" (parts of the model placed otherwise than chunk
    by chunk over the stages), "split" (backwards in two halves), "groups" (micro-batches in a row: several receives
    posted on a link), "stream" (no flush between batches), "in_place" (of a stream: one weight version, which a stage
    steps by itself after its own last backward of a batch), "swap" (tensors to host memory and back), "recompute"
    (parts computed again before their input gradient), "times" (those of the run are measured, and an order is made for
    them).
    needs_at_some: what else it needs at some sizes only, for which nobody is asked who does not ask for them.
    needs_with_chunks: what else it needs where stages have several model chunks: :meth:`needed`.
    update_follows: for a stream, the micro-batch after whose forward, on every stage, the step of a batch is finished.
    check: raises ScheduleError for a size that cannot be.
    live: per stage, the most live units without BPipe, where that is known without the order. settled: the fewest
    micro-batches of which a batch in the same groups holds as much, on every stage and under BPipe too. The planner,
    which weighs many sizes, builds programs of all their micro-batches where they are None.
    chunked: the schedule that goes by this name too where stages have several model chunks.
    fused: a stage computes a backward together with the forward before it, where neither waits for the other.
    fused_form: the same schedule with an order for that; None where it has none.
    table: the schedule itself, where there is one for one size only: see :meth:`of`.
    """

    name: str
    summary: str
    order: Callable[[Size], Sequence[Sequence[Action]]]
    bound: Callable[[Size], int]
    balanced: Callable[[Size], int] | None = None
    places: Callable[[Size], Places] = lambda size: loop(size.stages, size.chunks)
    chunks: tuple[int, int | None] = (1, 1)
    needs: frozenset[Need] = frozenset()
    needs_at_some: frozenset[Need] = frozenset()
    needs_with_chunks: frozenset[Need] = frozenset()
    update_follows: Callable[[Size, int], int] | None = None
    check: Callable[[Size], None] = lambda size: None
    drawings: tuple[Drawing, ...] = ()
    table: Schedule | None = None
    chunked: str | None = None
    fused: bool = False
    fused_form: Spec | None = None
    live: Callable[[Size], Sequence[int]] | None = None
    settled: Callable[[Size], int] | None = None

    @classmethod
    def of(cls, schedule: Schedule, needs: frozenset[Need]) -> Spec:
        """Return a schedule of one size only, such as a user's own table, which is carried out as it stands."""
        return cls(
            schedule.name,
            f"{schedule.stages} stages, {schedule.micro_batches} micro-batches",
            order=lambda size: schedule.actions,
            bound=lambda size: schedule.bound,
            places=lambda size: schedule.places,
            chunks=(schedule.chunks, schedule.chunks),
            needs=needs,
            table=schedule,
        )

    @property
    def goes_on(self) -> bool:
        """Return whether it says, without flushes, how a run goes on from batch to batch."""
        return self.update_follows is not None or ("in_place" in self.needs and self.table is None)

    @property
    def weight_versions(self) -> int:
        """Return how many versions of the weights a stage has: two without flushes, unless it steps in place."""
        return 2 if "stream" in self.needs and "in_place" not in self.needs else 1

    def needed(self, chunks: int) -> frozenset[Need]:
        """Return what an engine must offer for so many model chunks a stage."""
        if chunks == 1:
            return self.needs
        lies_in_loops = self.chunks[1] is None and self.places(Size(2, 2, chunks)) == loop(2, chunks)
        return self.needs | (self.needs_with_chunks - {"vee"} if lies_in_loops else self.needs_with_chunks)

    def fitted(self, size: Size) -> Size:
        """``size``, with the number of chunks where that is fixed, and no group larger than a batch.

        Raises ScheduleError, one line that names the argument, where there is no such schedule.
        """
        least, most = self.chunks
        if least == most and size.chunks == 1:
            size = size._replace(chunks=least)
        for argument, value in size._asdict().items():
            if value < 1:
                raise ScheduleError(f"{argument}={value}: must be at least 1")
        units = size.stages * size.micro_batches * size.chunks * size.batches
        if units > _MOST_UNITS:
            argument, value = max(size._replace(group_size=1)._asdict().items(), key=lambda item: item[1])
            raise ScheduleError(
                f"{argument}={value}: makes {units:,} forwards (stages × micro-batches × chunks × batches), and at "
                f"most {_MOST_UNITS:,} can be ordered and verified: give less"
            )
        if size.chunks < least:
            raise ScheduleError(f"chunks={size.chunks}: {self.name} needs at least {least} model chunks a stage")
        if most is not None and size.chunks > most:
            have = "one model chunk a stage" if most == 1 else f"{most} model chunks a stage"
            raise ScheduleError(f"chunks={size.chunks}: {self.name} has {have}; interleaved has as many as you like")
        if size.group_size != 1 and "groups" not in self.needs | self.needs_at_some:
            raise ScheduleError(
                f"group_size={size.group_size}: {self.name} groups no micro-batches: give 1, or choose schedule kfkb"
            )
        if size.batches != 1 and "stream" not in self.needs:
            raise ScheduleError(
                f"batches={size.batches}: {self.name} flushes after every batch: give 1, or choose schedule 2bw"
            )
        size = size._replace(group_size=min(size.group_size, size.micro_batches))
        if self.table is not None:
            return self._of_table(size, self.table)
        self.check(size)
        return size

    def _of_table(self, size: Size, table: Schedule) -> Size:
        for argument, given in size._asdict().items():
            fixed = getattr(table, argument)
            # One group, and one batch, is what is asked for where nothing is said of them.
            if given != fixed and not (given == 1 and argument in ("group_size", "batches")):
                raise ScheduleError(
                    f"{argument}={given}: the table {self.name} is of {fixed}: give that, or another table"
                )
        return size._replace(batches=table.batches, group_size=table.group_size)


_action = lru_cache(1 << 16)(Action)  # the same on every stage


def units(micro_batches: int) -> list[Unit]:
    """Return all micro-batches of one model chunk, in order."""
    return [Unit(number) for number in range(micro_batches)]


def alternate(forwards: Sequence[Unit], backwards: Sequence[Unit], warmup: int) -> Iterator[Action]:
    """``warmup`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    for unit in forwards[:warmup]:
        yield _action(FORWARD, *unit)
    for ahead, unit in zip(forwards[warmup:], backwards, strict=False):
        yield _action(FORWARD, *ahead)
        yield _action(BACKWARD, *unit)
    for unit in backwards[len(forwards) - warmup :]:
        yield _action(BACKWARD, *unit)


def halved(row: Iterable[Action], lag: int) -> Iterator[Action]:
    """Split each backward of a stage; weight gradients follow ``lag`` input gradients later, the last ones at the end.

    So a cool-down, which would wait for gradients of the next stage, has weight gradients to compute meanwhile.
    """
    pending = deque[Unit]()
    for action in row:
        if action.kind != BACKWARD:
            yield action
            continue
        yield _action(INPUT_GRADIENT, *action.unit)
        pending.append(action.unit)
        if len(pending) > lag:
            yield _action(WEIGHT_GRADIENT, *pending.popleft())
    for unit in pending:
        yield _action(WEIGHT_GRADIENT, *unit)
