"""The symbols of other packages that EvenPipe replaces or relies on, as entries of a list that can be shown."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from evenpipe.upstream.expectation import Distribution, Expectation
from evenpipe.upstream.patches import FITS, Patch, PatchSet
from evenpipe.upstream.symbols import UpstreamError, module_of

__all__ = ["Item", "Purpose", "expected_item", "patch_items"]


class Purpose(Enum):
    """What a symbol is needed for."""

    TRAINING = "training"
    CPU_MODE = "CPU mode"
    TRAINER = "evenpipe train"


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
        """Whether EvenPipe replaces the symbol; it calls it if not."""
        return self.reason is not None

    def in_package(self, package: str) -> bool:
        """Whether it is defined in that package."""
        return f"{module_of(self.symbols[0])}.".startswith(f"{package}.")


def patch_items(purpose: Purpose, patches: PatchSet) -> Iterator[Item]:
    """An item for each of the patches."""
    for patch in patches.list():
        yield Item(
            purpose,
            patches.name,
            patch.name,
            patch.targets,
            patch.distribution,
            patch.versions,
            patch.reason,
            functools.partial(_state, patches.name, patch),
        )


def expected_item(purpose: Purpose, owner: str, expectation: Expectation) -> Item:
    """The item of a symbol that `owner` calls, or overrides."""

    def check() -> str:
        try:
            expectation.verify()
        except UpstreamError as error:
            return str(error)
        return FITS

    symbol = expectation.symbol
    name = symbol.partition(":")[2]
    return Item(purpose, owner, name, (symbol,), expectation.distribution, expectation.versions, None, check)


def _state(owner: str, patch: Patch) -> str:
    """Of this patch alone, and without a guard: a machine that refuses CPU mode can still tell whether it would fit."""
    [(_, state)] = PatchSet(owner, [patch]).check()
    return state
