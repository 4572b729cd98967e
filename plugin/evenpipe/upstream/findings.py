"""List the symbols of other packages that EvenPipe replaces or calls, and compare a copy of a package with the list."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from evenpipe.upstream.expectation import Distribution, Expectation
from evenpipe.upstream.patches import APPLIED, FITS, Patch, PatchSet
from evenpipe.upstream.source import Read, found_in
from evenpipe.upstream.symbols import UpstreamError, module_of

__all__ = [
    "Finding",
    "Findings",
    "Item",
    "Purpose",
    "State",
    "examine_source",
    "find_by_import",
    "find_in_source",
    "items_of",
]


class Purpose(Enum):
    """The purpose that a symbol is needed for."""

    TRAINING = "training"
    CPU_MODE = "CPU mode"
    TRAINER = "evenpipe train"
    PARTITION = "evenpipe partition"


@dataclass(frozen=True)
class Item:
    """A symbol that EvenPipe replaces, for `reason`, or only calls.

    `symbols` are where it is bound, the definition first; `versions` maps a series, or ANY, to its signature; `check()`
    imports it and returns FITS, APPLIED or one line that says why not.
    """

    purpose: Purpose
    owner: str
    name: str
    symbols: tuple[str, ...]
    distribution: Distribution
    versions: Mapping[str, str]
    reason: str | None
    check: Callable[[], str]

    @property
    def is_replaced(self) -> bool:
        """Return whether EvenPipe replaces the symbol, everywhere or on single objects; if not, it only calls it."""
        return self.reason is not None

    def in_package(self, package: str) -> bool:
        return f"{module_of(self.symbols[0])}.".startswith(f"{package}.")


def items_of(purpose: Purpose, patches: PatchSet) -> Iterator[Item]:
    """An item for each of the patches, and for each symbol that the set expects."""
    for patch in patches.list():
        state = functools.partial(_state, patches.name, patch)
        about = (patch.name, patch.targets, patch.distribution, patch.versions, patch.reason)
        yield Item(purpose, patches.name, *about, state)
    read: Read = {}
    for each in patches.expectations:
        name, holds = each.symbol.partition(":")[2], functools.partial(_holds, each, read)
        yield Item(purpose, patches.name, name, (each.symbol,), each.distribution, each.versions, each.reason, holds)


def _holds(expectation: Expectation, read: Read) -> str:
    try:
        expectation.verify(read)
    except UpstreamError as error:
        return str(error)
    return FITS


def _state(owner: str, patch: Patch) -> str:
    """Return the state of this patch alone, without its set's guard.

    So a machine that refuses CPU mode can still tell whether the patch would fit.
    """
    [(_, state)] = PatchSet(owner, [patch]).check()
    return state


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
        """Return whether EvenPipe can train with it; CPU mode, which GPU runs do not need, does not count."""
        return not self.problems()

    def problems(self, *purposes: Purpose) -> tuple[str, ...]:
        """Return the lines that say what keeps these from working; by default all but CPU mode."""
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
    """Return what `find` finds of `items` in the source in `root`, whose version `version_in` reads.

    `problem` says why the version cannot be read, or is not supported; then no item is looked for.
    """
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
