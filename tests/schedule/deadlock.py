"""The one judge of deadlock in these tests: all stages carry out their calls, each whenever it can."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from evenpipe.schedule import UPDATE, Gathering, Message, Step

__all__ = ["Call", "blocking_calls", "stuck"]


class Call(NamedTuple):
    """``give``: the thing is there from now on. ``take``: wait until it is, so many times. ``meet``: wait for so many.

    What stages have met is there, too.
    """

    kind: Literal["give", "take", "meet"]
    what: Hashable
    count: int = 1


def stuck(rows: Sequence[Sequence[Call]]) -> list[tuple[int, Call]]:
    """Of each stage that waits for ever: at which of its calls."""
    at = [0] * len(rows)
    there: dict[Hashable, set[object]] = defaultdict(set)
    moved = True
    while moved:
        moved = False
        for stage, calls in enumerate(rows):
            while at[stage] < len(calls):
                kind, what, count = calls[at[stage]]
                if kind != "take":
                    there[what].add(stage if kind == "meet" else (stage, at[stage]))
                if kind != "give" and len(there[what]) < count:
                    break
                at[stage] += 1
                moved = True
    return [(stage, calls[at[stage]]) for stage, calls in enumerate(rows) if at[stage] < len(calls)]


def blocking_calls(steps: Iterable[Step], stages: int) -> list[Call]:
    """A stage's calls where every one waits until it is through: both ends of a message have to be there at once.

    A gathering wants all stages, an update what was gathered.
    """
    return list(_blocking(steps, stages))


def _blocking(steps: Iterable[Step], stages: int) -> Iterator[Call]:
    for step in steps:
        yield from (_met(item, stages) for item in step.post)
        yield from (_met(message, stages)._replace(kind="take") for message in (*step.complete, *step.follows))
        if step.transfer is not None:
            yield _met(step.transfer, stages)
        if step.action.kind == UPDATE:
            yield Call("take", Gathering(step.action.micro_batch), stages)
        yield from (_met(item, stages) for item in step.then_post)
        if step.send is not None and not step.send.is_local:
            yield _met(step.send, stages)


def _met(item: Message | Gathering, stages: int) -> Call:
    return Call("meet", item, stages if isinstance(item, Gathering) else len({item.link.source, item.link.target}))
