"""What became of the symbols of a list in one copy of a package."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from evenpipe.upstream.expectation import Distribution
from evenpipe.upstream.items import Item, Purpose
from evenpipe.upstream.patches import APPLIED, FITS
from evenpipe.upstream.source import Read, found_in
from evenpipe.upstream.symbols import UpstreamError

__all__ = ["Finding", "Findings", "State", "examine_source", "find_by_import", "find_in_source"]


class State(Enum):
    """Whether a symbol is what EvenPipe was written against."""

    FITS = "fits"
    APPLIED = "applied"
    MISFIT = "does not fit"
    NOT_IMPORTABLE = "not importable here"
    ABSENT = "absent"


_TRAINS = (Purpose.TRAINING, Purpose.TRAINER, Purpose.PARTITION)
_STATES = {FITS: State.FITS, APPLIED: State.APPLIED}


class Finding(NamedTuple):
    """`detail` is one line where something keeps the symbol from being used: what was found, expected, what to do."""

    item: Item
    state: State
    detail: str | None = None


@dataclass(frozen=True)
class Findings:
    """One copy: the folder that its packages lie in, its version and series where these are known.

    `problem` is one line where the version keeps everything else from being looked at, or from being used.
    """

    root: Path | None
    version: str | None
    series: str | None
    problem: str | None
    findings: tuple[Finding, ...]

    @property
    def supported(self) -> bool:
        """Whether EvenPipe can train with it; CPU mode, which GPU runs do not need, does not count."""
        return not self.problems()

    def problems(self, *purposes: Purpose) -> tuple[str, ...]:
        """The lines that say what keeps these from working; by default all but CPU mode."""
        of = purposes or _TRAINS
        lines = [self.problem, *(finding.detail for finding in self.findings if finding.item.purpose in of)]
        return tuple(dict.fromkeys(line for line in lines if line is not None))


def find_by_import(item: Item) -> Finding:
    """Compare the item with what this interpreter imports."""
    said = item.check()
    return Finding(item, _STATES[said]) if said in _STATES else Finding(item, State.MISFIT, said)


def examine_source(
    root: Path,
    distribution: Distribution,
    supported: Iterable[str],
    version_in: Callable[[Path], str],
    items: Iterable[Item],
    find: Callable[[Path, Item, str, str, Read], Finding],
) -> Findings:
    """What became of `items`, as `find` finds them, in the source in `root`, whose version `version_in` tells."""
    version = None
    try:
        version = version_in(root)
        series = distribution.series(supported, version)
    except UpstreamError as error:
        return Findings(root, version, None, str(error), ())
    read: Read = {}
    found = tuple(find(root, item, series, version, read) for item in items if series in item.versions)
    return Findings(root, version, series, None, found)


def find_in_source(root: Path, item: Item, series: str, version: str, read: Read) -> Finding:
    """Compare the item with the source in the folder `root`, of that series, without importing anything."""
    expected = item.versions[series]
    for symbol in item.symbols:
        try:
            found = found_in(root, symbol, expected, read)
        except UpstreamError as error:
            return Finding(item, State.MISFIT, str(error))
        if found != expected:
            return Finding(
                item,
                State.MISFIT,
                f"{symbol}: {item.distribution.name} {version} has signature {found}, expected {expected}: use an "
                "unmodified supported release",
            )
    return Finding(item, State.FITS)
