"""Everything of Megatron that EvenPipe replaces or relies on, and whether a copy of it is one that EvenPipe knows."""

from __future__ import annotations

import contextlib
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from evenpipe.megatron.cpu_mode import cpu_mode
from evenpipe.megatron.planned_layout import half_layers
from evenpipe.megatron.schedule_patches import in_place_of_megatron
from evenpipe.megatron.supported import MEGATRON_CORE, RELEASES
from evenpipe.megatron.symbols import CHUNKS, OVERLAPPING, layer_kinds, without_processes
from evenpipe.megatron.train_engine.stock import reporting_to
from evenpipe.megatron.two_bw_symbols import QUANTISED, TWO_BW
from evenpipe.megatron.vee import vee_patches
from evenpipe.megatron.weight_gradients import linear_layers
from evenpipe.megatron_lm.chunks import chunk_patches
from evenpipe.megatron_lm.cpu_scripts import script_patches as cpu_script_patches
from evenpipe.megatron_lm.delayed import delayed_gradients
from evenpipe.megatron_lm.install import script_patches
from evenpipe.megatron_lm.log import log_patches
from evenpipe.megatron_lm.measured import measured_patches
from evenpipe.megatron_lm.predicted_vs_measured import comparison_patches
from evenpipe.megatron_lm.two_bw.training import CALLED, two_bw_patches
from evenpipe.upstream import ANY, PatchSet, UpstreamError
from evenpipe.upstream.findings import (
    Finding,
    Findings,
    Item,
    Purpose,
    State,
    examine_source,
    find_by_import,
    find_in_source,
    items_of,
)
from evenpipe.upstream.source import Read, literal_in
from evenpipe.upstream.symbols import module_of

__all__ = ["TRAINING_PACKAGE", "VERSION_FILE", "catalogue", "examine", "look", "version_in"]


TRAINING_PACKAGE: Final = "megatron.training"
"""What scripts of Megatron-LM are made of; wheels of megatron-core before 0.17 do not have it."""

_ENGINE: Final = "transformer_engine"

VERSION_FILE: Final = Path("megatron", "core", "package_info.py")

# The sets below are read and checked, never applied: there is nothing that they could plug in.
_NOTHING: Any = None


def catalogue() -> tuple[Item, ...]:
    """Return what each feature replaces and calls, from the list that it verifies when it starts. Needs no Megatron."""
    return tuple(item for purpose, sets in _sets().items() for each in sets for item in items_of(purpose, each))


def _sets() -> dict[Purpose, list[PatchSet]]:
    return {
        Purpose.TRAINING: [
            *script_patches(),
            in_place_of_megatron(_NOTHING),
            linear_layers(),
            delayed_gradients(),
            vee_patches(),
            PatchSet("chunks", [*chunk_patches()], CHUNKS),
            PatchSet("combined steps", [], OVERLAPPING),
            log_patches(_NOTHING),
            PatchSet("2bw", two_bw_patches(_NOTHING), [*TWO_BW, *CALLED]),
            PatchSet("2bw with Transformer Engine", [], QUANTISED),
            measured_patches(_NOTHING),
            comparison_patches(_NOTHING),
            half_layers(_NOTHING),
        ],
        Purpose.CPU_MODE: [cpu_mode(), *cpu_script_patches().values()],
        Purpose.TRAINER: [reporting_to(_NOTHING), PatchSet("profile", [], without_processes())],
        Purpose.PARTITION: [PatchSet("layers", [], layer_kinds())],
    }


def examine(root: Path) -> Findings:
    """Look at a checkout of Megatron-LM, or at the folder that megatron-core is installed in.

    Symbols of torch are left out, as most are written in C.
    """
    items = [item for item in catalogue() if item.in_package("megatron")]
    return examine_source(root, MEGATRON_CORE, RELEASES, version_in, items, _found_in_source)


def version_in(root: Path) -> str:
    """Return the version of the megatron-core in `root`, without the commit that an import of a checkout adds to it.

    Raises UpstreamError where its file does not state one.
    """
    parts = [literal_in(root, f"megatron.core.package_info:{name}") for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(map(str, parts)) + str(literal_in(root, "megatron.core.package_info:PRE_RELEASE"))


def _found_in_source(root: Path, item: Item, series: str, version: str, read: Read) -> Finding:
    if item.in_package(TRAINING_PACKAGE) and not root.joinpath(*TRAINING_PACKAGE.split(".")).exists():
        return Finding(item, State.ABSENT)
    return find_in_source(root, item, series, version, read)


def look() -> Findings:
    """Import what the catalogue names, and compare it with what is recorded. Never raises for what it finds."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        problem = _import("megatron.core")
        version = series = root = None
        if problem is None:
            root = Path(sys.modules["megatron.core"].__path__[0]).parents[1]
            try:
                version = MEGATRON_CORE.version()
                series = MEGATRON_CORE.series(RELEASES)
            except UpstreamError as error:
                problem = str(error)
        # What a release does not have, nothing of that release relies on.
        items = [item for item in catalogue() if series is None or not {series, ANY}.isdisjoint(item.versions)]
        return Findings(root, version, series, problem, tuple(_finding(item) for item in items))


def _finding(item: Item) -> Finding:
    module = module_of(item.symbols[0])
    if item.in_package(_ENGINE) and find_spec(_ENGINE) is None:
        return Finding(item, State.ABSENT)
    failure = _import(module)
    if failure is None:
        return find_by_import(item)
    if item.in_package(TRAINING_PACKAGE) and _import("megatron.core") is None and find_spec(TRAINING_PACKAGE) is None:
        return Finding(item, State.ABSENT)
    return Finding(item, State.NOT_IMPORTABLE, failure)


def _import(module: str) -> str | None:
    """One line when the module cannot be imported, whatever it raises."""
    try:
        import_module(module)
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())
        return f"{module}: cannot be imported here ({type(error).__name__}: {said}): run in the environment that trains"
    return None
