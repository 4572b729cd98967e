"""Arguments of Megatron-LM's scripts that make no sense without a GPU."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

__all__ = ["adapt_arguments", "missing_package"]

# By argument: the value that works on CPU, and the flag that gives it. YAML files name the layer norm's the other way.
_VALUES: dict[str, tuple[Any, str]] = {
    "distributed_backend": ("gloo", "--distributed-backend gloo"),
    "transformer_impl": ("local", "--transformer-impl local"),
    "no_persist_layer_norm": (True, "--no-persist-layer-norm"),
    "persist_layer_norm": (False, "--no-persist-layer-norm"),
    "gradient_accumulation_fusion": (False, "--no-gradient-accumulation-fusion"),
    "masked_softmax_fusion": (False, "--no-masked-softmax-fusion"),
    "apply_rope_fusion": (False, "--no-rope-fusion"),
}


def adapt_arguments(args: Namespace) -> list[str]:
    """Give `args`, parsed but not validated, values that work on CPU; what was changed, as flags.

    Arguments that a release or a YAML file does not have are left out.
    """
    changed = []
    for group in _groups(args):
        for name, (value, flag) in _VALUES.items():
            if getattr(group, name, value) != value:
                setattr(group, name, value)
                changed.append(flag)
    return changed


def missing_package(args: Namespace) -> str | None:
    """One line when a package is missing without which the run that `args` ask for would hang, else None."""
    saves = getattr(args, "save", None) is not None and getattr(args, "ckpt_format", None) == "torch_dist"
    if saves and importlib.util.find_spec("psutil") is None:
        return (
            "--save with --ckpt-format torch_dist: psutil is not installed, and without it the writing of a checkpoint "
            "never ends: pip install psutil, or use --ckpt-format torch"
        )
    return None


def _groups(args: Namespace) -> Iterator[Any]:
    """The arguments, and the groups of them that a YAML file makes."""
    yield args
    yield from (value for value in vars(args).values() if isinstance(value, SimpleNamespace))
