"""What a page has to say, whatever it is of: plain values that the template and the charts take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evenpipe.simulate import MemoryPoint, Simulation, Span

__all__ = ["Drawn", "Pairs", "Table", "View", "amount", "milliseconds", "percent"]

#: Names and values, in their order.
Pairs = Sequence[tuple[str, str]]


class Table(NamedTuple):
    """Rows of text; the first cell of each names its row."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Drawn(NamedTuple):
    """A batch in time: actions of each stage, and what it holds. ``sized``: whether the bytes are known.

    name: "measured" or "predicted".
    """

    name: str
    stages: Sequence[Sequence[Span]]
    memory: Sequence[Sequence[MemoryPoint]]
    sized: bool

    @classmethod
    def of(cls, simulation: Simulation, sized: bool) -> Drawn:
        """A prediction."""
        return cls("predicted", simulation.timeline, [stage.memory for stage in simulation.stages], sized)

    @property
    def actions(self) -> int:
        return sum(map(len, self.stages))


class View(NamedTuple):
    """One thing that is looked at. ``drawn``: what is measured comes first.

    facts: what it comes to. summary: how much of the time is lost, in a sentence. explained: more on that. tables: what
    else there is. notes: what else is to be known of what is shown, before all.
    """

    title: str
    facts: Pairs
    drawn: Sequence[Drawn]
    stages: Table
    explained: Sequence[str] = ()
    tables: Sequence[Table] = ()
    settings: Pairs = ()
    versions: Pairs = ()
    summary: str = ""
    notes: Sequence[str] = ()


def amount(nbytes: float) -> str:
    """Bytes as people read them."""
    power = min(4, max(0, (int(nbytes).bit_length() - 1) // 10))
    return f"{nbytes / 1024**power:,.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def milliseconds(ms: float) -> str:
    """A time as people read it: four digits, or all before the point."""
    return f"{ms:,.0f} ms" if ms >= 1000 else f"{ms:.4g} ms"


def percent(share: float, digits: int = 0) -> str:
    """A share, in [0, 1]."""
    return f"{100 * share:.{digits}f} %"
