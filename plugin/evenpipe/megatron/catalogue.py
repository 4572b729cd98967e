"""Everything of other packages that EvenPipe replaces or relies on, listed without importing Megatron."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from evenpipe.megatron.choice import schedule_patches
from evenpipe.megatron.cpu_mode.core import cpu_mode
from evenpipe.megatron.cpu_mode.scripts import script_patches as cpu_script_patches
from evenpipe.megatron.script.adaptive.training import adaptive_patches
from evenpipe.megatron.script.install import script_patches
from evenpipe.megatron.script.log import log_patch
from evenpipe.megatron.script.two_buffered.training import two_buffered_patches
from evenpipe.megatron.supported import MEGATRON_CORE, RELEASES, recorded
from evenpipe.megatron.trainer.follow import reporting_to
from evenpipe.upstream import FITS, Distribution, Expectation, Patch, PatchSet, UpstreamError

__all__ = ["Item", "Purpose", "catalogue"]

# The sets below are read and checked, never applied: there is nothing that they could plug in.
_NOTHING: Any = None


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

    @property
    def of_megatron(self) -> bool:
        """Whether it is Megatron's, not torch's."""
        return self.in_package("megatron")

    def in_package(self, package: str) -> bool:
        """Whether it is defined in that package."""
        return self.symbols[0].startswith(f"{package}.")


def catalogue() -> tuple[Item, ...]:
    """The patches first, then what is relied on."""
    patches = [item for purpose, sets in _sets().items() for each in sets for item in _items(purpose, each)]
    replaced = {item.symbols[0] for item in patches if item.purpose is Purpose.TRAINING}
    called = dict.fromkeys(symbol for release in RELEASES.values() for symbol in release.signatures)
    return (*patches, *(_relied_on(symbol) for symbol in called if symbol not in replaced))


def _sets() -> dict[Purpose, list[PatchSet]]:
    return {
        Purpose.TRAINING: [
            *script_patches(),
            PatchSet("schedule", schedule_patches(_NOTHING)),
            PatchSet("log", [log_patch(_NOTHING)]),
            PatchSet("2bw", two_buffered_patches(_NOTHING)),
            PatchSet("auto", adaptive_patches(_NOTHING)),
        ],
        Purpose.CPU_MODE: [cpu_mode(), *cpu_script_patches().values()],
        Purpose.TRAINER: [reporting_to(_NOTHING)],
    }


def _items(purpose: Purpose, patches: PatchSet) -> Iterator[Item]:
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


def _state(owner: str, patch: Patch) -> str:
    """Of this patch alone, and without a guard: a machine that refuses CPU mode can still tell whether it would fit."""
    [(_, state)] = PatchSet(owner, [patch]).check()
    return state


def _relied_on(symbol: str) -> Item:
    expectation = Expectation(symbol, MEGATRON_CORE, recorded(symbol))

    def check() -> str:
        try:
            expectation.verify()
        except UpstreamError as error:
            return str(error)
        return FITS

    name = symbol.partition(":")[2]
    return Item(Purpose.TRAINING, "schedule", name, (symbol,), MEGATRON_CORE, expectation.versions, None, check)
