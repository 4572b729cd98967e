"""Whether a folder holds a Megatron that EvenPipe supports, told from its source without importing anything."""

from __future__ import annotations

from pathlib import Path

from evenpipe.megatron.catalogue import TRAINING_PACKAGE, catalogue
from evenpipe.megatron.supported import MEGATRON_CORE, RELEASES
from evenpipe.upstream import UpstreamError
from evenpipe.upstream.findings import Finding, Findings, ReadVersion, State, find_in_source
from evenpipe.upstream.items import Item, Purpose
from evenpipe.upstream.source import literal_in

__all__ = ["VERSION_FILE", "examine", "version_in"]

VERSION_FILE = Path("megatron", "core", "package_info.py")


def examine(root: Path) -> Findings:
    """Look at a checkout of Megatron-LM, or at the folder that megatron-core is installed in.

    Symbols of torch are left out, as most are written in C.
    """
    version = None
    try:
        version = version_in(root)
        series = ReadVersion(MEGATRON_CORE.name, found=version).series(RELEASES)
    except UpstreamError as error:
        return Findings(root, version, None, str(error), ())
    items = [item for item in catalogue() if item.purpose is not Purpose.TRAINER and item.in_package("megatron")]
    findings = tuple(_finding(root, item, series, version) for item in items if series in item.versions)
    return Findings(root, version, series, None, findings)


def version_in(root: Path) -> str:
    """The version of the megatron-core in `root`, without the commit that an import of a checkout adds to it.

    Raises UpstreamError where its file does not state one.
    """
    parts = [literal_in(root, f"megatron.core.package_info:{name}") for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(map(str, parts)) + str(literal_in(root, "megatron.core.package_info:PRE_RELEASE"))


def _finding(root: Path, item: Item, series: str, version: str) -> Finding:
    if item.in_package(TRAINING_PACKAGE) and not root.joinpath(*TRAINING_PACKAGE.split(".")).exists():
        return Finding(item, State.ABSENT)
    return find_in_source(root, item, series, version)
