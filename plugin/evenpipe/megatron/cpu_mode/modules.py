"""Modules that Megatron imports and that a machine without a GPU, or a fresh checkout, does not have."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

__all__ = [
    "DATASETS",
    "EXPERTS",
    "have_dataset_helpers",
    "stand_in_for_triton_kernels",
    "take_dataset_helpers_from_the_wheel",
    "without_transformer_engine",
]

DATASETS = "megatron.core.datasets"
EXPERTS = "megatron.core.transformer.moe.moe_utils"
_HELPERS = f"{DATASETS}.helpers_cpp"
_TRITON_KERNELS = (
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
    "megatron.core.transformer.moe.paged_stash",
)


def have_dataset_helpers() -> bool:
    """Whether Megatron's compiled dataset helpers are loaded or can be."""
    return _HELPERS in sys.modules or importlib.util.find_spec(_HELPERS) is not None


def take_dataset_helpers_from_the_wheel() -> None:
    """Load the helpers of an installed megatron-core in a checkout that has not compiled its own.

    Their functions are the same in every supported release. Does nothing where there are none.
    """
    file = None if have_dataset_helpers() else _installed_helpers()
    spec = None if file is None else importlib.util.spec_from_file_location(_HELPERS, file)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_HELPERS] = module
    vars(import_module(DATASETS))["helpers_cpp"] = module


def _installed_helpers() -> Path | None:
    try:
        wheel = metadata.distribution("megatron-core")
    except metadata.PackageNotFoundError:
        return None
    files = (Path(str(wheel.locate_file(f"{_HELPERS.replace('.', '/')}{suffix}"))) for suffix in EXTENSION_SUFFIXES)
    return next((file for file in files if file.exists()), None)


def without_transformer_engine() -> None:
    """Routers look for its matrix product under a name that nothing has without it; None has them take torch's."""
    vars(import_module(EXPERTS)).setdefault("te_general_gemm", None)


def stand_in_for_triton_kernels() -> None:
    """Without triton, let the modules that are written in it be imported; what is called in them raises."""
    if importlib.util.find_spec("triton") is None:
        for name in _TRITON_KERNELS:
            sys.modules.setdefault(name, _WithoutTriton(name))


class _WithoutTriton(ModuleType):
    """Has every function, and each of them raises ImportError."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
            raise ImportError(f"{self.__name__}.{name} needs triton, and a GPU: leave out the flag that asks for it")

        return unavailable
