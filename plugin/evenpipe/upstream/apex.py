"""Recognises another package of the name "apex", as the registry has one, where Megatron means NVIDIA Apex."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

__all__ = ["wrong_apex"]

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
    if spec is None or _has_nvidias(spec.submodule_search_locations or ()):
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


def _has_nvidias(folders: Iterable[str]) -> bool:
    return any(Path(folder, name).is_dir() for folder in folders for name in _SUBPACKAGES)
