"""Everything of other packages that EvenPipe replaces or relies on, listed without importing Megatron."""

from __future__ import annotations

from typing import Any, Final

from evenpipe.megatron.choice import schedule_patches
from evenpipe.megatron.cpu_mode.core import cpu_mode
from evenpipe.megatron.cpu_mode.scripts import script_patches as cpu_script_patches
from evenpipe.megatron.script.adaptive.training import adaptive_patches
from evenpipe.megatron.script.install import script_patches
from evenpipe.megatron.script.log import log_patch
from evenpipe.megatron.script.two_buffered.training import two_buffered_patches
from evenpipe.megatron.supported import MEGATRON_CORE, RELEASES, recorded
from evenpipe.megatron.train_engine.stock import reporting_to
from evenpipe.upstream import Expectation, PatchSet
from evenpipe.upstream.items import Item, Purpose, relied_on, replaced_by

__all__ = ["TRAINING_PACKAGE", "catalogue"]

TRAINING_PACKAGE: Final = "megatron.training"
"""What scripts of Megatron-LM are made of; wheels of megatron-core before 0.17 do not have it."""

# The sets below are read and checked, never applied: there is nothing that they could plug in.
_NOTHING: Any = None


def catalogue() -> tuple[Item, ...]:
    """The patches first, then what is relied on."""
    patches = [item for purpose, sets in _sets().items() for each in sets for item in replaced_by(purpose, each)]
    replaced = {item.symbols[0] for item in patches if item.purpose is Purpose.TRAINING}
    called = dict.fromkeys(symbol for release in RELEASES.values() for symbol in release.signatures)
    expected = [Expectation(symbol, MEGATRON_CORE, recorded(symbol)) for symbol in called if symbol not in replaced]
    return (*patches, *(relied_on(Purpose.TRAINING, "schedule", each) for each in expected))


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
