"""The symbols of other packages that EvenPipe replaces or relies on, as entries of a list that can be shown."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from evenpipe.upstream.expectation import Distribution, Expectation
from evenpipe.upstream.patches import FITS, Patch, PatchSet
from evenpipe.upstream.source import Read
from evenpipe.upstream.symbols import UpstreamError, module_of

__all__ = ["Item", "Purpose", "items_of"]


class Purpose(Enum):
    """What a symbol is needed for."""

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
        """Whether EvenPipe replaces the symbol, everywhere or on single objects; it only calls it if not."""
        return self.reason is not None

    def in_package(self, package: str) -> bool:
        """Whether it is defined in that package."""
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
    """Of this patch alone, and without a guard: a machine that refuses CPU mode can still tell whether it would fit."""
    [(_, state)] = PatchSet(owner, [patch]).check()
    return state
