"""Everything of DeepSpeed that EvenPipe replaces or relies on, and whether a copy of it is one that EvenPipe knows."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any, Final

from evenpipe.deepspeed.checkpointing import checkpointing_patches
from evenpipe.deepspeed.start import engine_patches, start_patches
from evenpipe.deepspeed.supported import DEEPSPEED, RELEASES
from evenpipe.deepspeed.two_bw.drain_at_end import ending_patches
from evenpipe.upstream.findings import Findings, Item, Purpose, examine_source, find_by_import, find_in_source, items_of
from evenpipe.upstream.source import literal_in

__all__ = ["MAIN_FILE", "catalogue", "examine", "installed_in", "look"]

MAIN_FILE: Final = Path("deepspeed", "__init__.py")

# The sets are read, never applied: no section has asked for an engine.
_NO_SECTION: Any = None


def catalogue() -> tuple[Item, ...]:
    """Return what each feature replaces and calls, in the list that it verifies; made without importing DeepSpeed."""
    sets = (start_patches(), engine_patches(_NO_SECTION), checkpointing_patches(), ending_patches())
    return tuple(item for each in sets for item in items_of(Purpose.TRAINING, each))


def installed_in() -> Path | None:
    """Return the folder that an import would take DeepSpeed from; None where it is not installed."""
    spec = importlib.util.find_spec(DEEPSPEED.name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


def look() -> Findings | None:
    """Return what this interpreter would import; None where DeepSpeed is not installed.

    DeepSpeed's symbols are read from its source: an import looks for devices and compilers.
    """
    root = installed_in()
    if root is None:
        return None
    found = examine(root)
    others = tuple(find_by_import(item) for item in catalogue() if not item.in_package(DEEPSPEED.name))
    return dataclasses.replace(found, findings=(*found.findings, *others))


def examine(root: Path) -> Findings:
    """Look at a checkout of DeepSpeed, or at the folder that it is installed in, without importing anything.

    Symbols of torch are left out.
    """
    items = [item for item in catalogue() if item.in_package(DEEPSPEED.name)]
    return examine_source(root, DEEPSPEED, RELEASES, _version_in, items, find_in_source)


def _version_in(root: Path) -> str:
    """As an installed release states it, or a checkout, which has the version in a file of its own."""
    stated = root / "version.txt"
    if not (root / "setup.py").is_file() or not stated.is_file():
        return str(literal_in(root, "deepspeed.git_version_info_installed:version"))
    return stated.read_text().strip()
