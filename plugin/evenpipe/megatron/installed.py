"""Whether EvenPipe supports the Megatron that this interpreter imports; nothing is started, no patch is applied."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import warnings
from importlib import import_module
from pathlib import Path

from evenpipe.megatron.catalogue import TRAINING_PACKAGE, catalogue
from evenpipe.megatron.supported import MEGATRON_CORE, RELEASES
from evenpipe.upstream import ANY, UpstreamError
from evenpipe.upstream.findings import Finding, Findings, State, find_by_import
from evenpipe.upstream.items import Item
from evenpipe.upstream.symbols import module_of

__all__ = ["look"]


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
    failure = _import(module)
    if failure is None:
        return find_by_import(item)
    if item.in_package(TRAINING_PACKAGE) and _import("megatron.core") is None and not _exists(TRAINING_PACKAGE):
        return Finding(item, State.ABSENT)
    return Finding(item, State.NOT_IMPORTABLE, failure)


def _exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _import(module: str) -> str | None:
    """One line when the module cannot be imported, whatever it raises."""
    try:
        import_module(module)
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())
        return f"{module}: cannot be imported here ({type(error).__name__}: {said}): run in the environment that trains"
    return None
