"""What is installed, and whether EvenPipe knows it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Final

from evenpipe.doctor.finding import Finding, fine, noted, problem
from evenpipe.upstream.findings import Findings, Purpose, State
from evenpipe.upstream.installed import too_old_torch, wrong_apex

__all__ = ["apex", "framework", "python_and_torch"]

_PYTHON: Final = (3, 10)


def python_and_torch() -> Iterator[Finding]:
    """This interpreter, and the torch that it would import."""
    here = f"Python {platform.python_version()} in {sys.prefix}"
    if sys.version_info < _PYTHON:
        yield problem("python", here, f"use {_PYTHON[0]}.{_PYTHON[1]} or newer")
    else:
        yield fine("python", here)
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield problem("torch", "not installed", "pip install torch")
        return
    if (too_old := too_old_torch()) is not None:
        said, _, remedy = too_old.removeprefix("torch ").rpartition(": ")
        yield problem("torch", said, remedy)
    else:
        yield fine("torch", version)


def framework(name: str, look: Callable[[], Findings | None]) -> Iterator[Finding]:
    """A framework that EvenPipe plugs into: its version, and the patches that would apply (``evenpipe patches``)."""
    found = look()
    if found is None:
        yield noted(name, "not installed here")
        return
    version = f"{found.version or 'unknown version'} in {found.root}"
    if problems := found.problems():
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        yield problem(
            name, f"{version}: not supported: {problems[0]}{more}", "install a supported release; evenpipe patches"
        )
        return
    replaced = [each for each in found.findings if each.item.is_replaced and each.item.purpose is Purpose.TRAINING]
    fit = sum(each.state in (State.FITS, State.APPLIED) for each in replaced)
    absent = sum(each.state is State.ABSENT for each in replaced)
    without = f", {absent} are for scripts that are not installed" if absent else ""
    yield fine(name, f"{version}: supported; {fit} of {len(replaced)} replaced symbols fit{without} (evenpipe patches)")


def apex() -> Iterator[Finding]:
    """The unrelated package of NVIDIA Apex's name that the registry has."""
    wrong = wrong_apex()
    if wrong is not None:
        said, _, remedy = wrong.rpartition(": ")
        yield problem("apex", said.removeprefix("apex: "), remedy)
        return
    try:
        version = metadata.version("apex")
    except metadata.PackageNotFoundError:
        yield fine("apex", "not installed, and not needed")
    else:
        yield fine("apex", f"NVIDIA's, {version}")
