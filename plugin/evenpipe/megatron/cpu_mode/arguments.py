"""Arguments of Megatron-LM's scripts that make no sense without a GPU."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

__all__ = ["adapt_arguments"]

_VALUES: dict[str, tuple[Any, str]] = {
    "distributed_backend": ("gloo", "--distributed-backend gloo"),
    "transformer_impl": ("local", "--transformer-impl local"),
    "no_persist_layer_norm": (True, "--no-persist-layer-norm"),
    "gradient_accumulation_fusion": (False, "--no-gradient-accumulation-fusion"),
    "masked_softmax_fusion": (False, "--no-masked-softmax-fusion"),
    "apply_rope_fusion": (False, "--no-rope-fusion"),
}


def adapt_arguments(args: Namespace) -> list[str]:
    """Give `args`, parsed but not validated, values that work on CPU; what was changed, as flags."""
    changed = []
    for name, (value, flag) in _VALUES.items():
        if getattr(args, name, value) != value:
            setattr(args, name, value)
            changed.append(flag)
    return changed
