"""Recognise installed packages that EvenPipe cannot work with: a too old torch, another package of the name "apex"."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

__all__ = ["OLDEST_TORCH", "has_module", "too_old_torch", "wrong_apex"]


OLDEST_TORCH: Final = (2, 10)
"""All of `tests/runtime` passes on it; of `tests/schedule` all but torch's own pipelines: gloo refused their first
exchange. On 2.7 a store cannot be cloned, so that a wait holds up the heartbeat; 2.6 has no group's `shutdown`."""


def has_module(name: str) -> bool:
    """Return whether a module can be imported; an empty folder, as `pip uninstall` leaves one, is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # no parent; a module made by hand
        return name in sys.modules
    return spec is not None and spec.origin is not None


def too_old_torch() -> str | None:
    """Return one line that says so of a torch which is too old; None of a newer one, or of none. Imports nothing."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is not None and (int(number[1]), int(number[2])) >= OLDEST_TORCH:
        return None
    oldest = ".".join(map(str, OLDEST_TORCH))
    return f"torch {version} is older than what EvenPipe works with: use {oldest} or newer"


# Of these Megatron takes its fused optimizers, layer norm and multi-tensor operations; every build of NVIDIA Apex has
# them, whatever was compiled.
_SUBPACKAGES = ("multi_tensor_apply", "optimizers", "normalization")


def wrong_apex() -> str | None:
    """One line when an import of apex would find something else than NVIDIA Apex; None when it would not, or nothing.

    Nothing is imported.
    """
    try:
        spec = importlib.util.find_spec("apex")
    except ValueError:  # a module made by hand, of which nothing more is known
        return None
    if spec is None:
        return None
    if any(Path(folder, name).is_dir() for folder in spec.submodule_search_locations or () for name in _SUBPACKAGES):
        return None
    if spec.origin is None:
        [folder, *_] = spec.submodule_search_locations or [""]
        return (
            f"apex: the folder {folder} is found in place of NVIDIA Apex, and Megatron, which takes it for that, can "
            "stop at its first layer norm: rename the folder, or start from another one"
        )
    return (
        f"apex: {spec.origin} is an unrelated package, not NVIDIA Apex, and of no use to Megatron, which works "
        "without any: pip uninstall apex (NVIDIA's is built from https://github.com/NVIDIA/apex)"
    )
