"""Transformer Engine's layers leave their weights' gradients for a second half if a setting says so as they are made.

Megatron's own check takes `--delay-wgrad-compute` with `--overlap-moe-expert-parallel-comm` only, under which our
backwards are whole; so the setting is made after it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any, Final

from evenpipe.megatron.symbols import DELAYED, training_patch
from evenpipe.upstream import PatchSet

__all__ = ["delayed_gradients", "too_old_engine"]

#: From here on Megatron lets gradients be reduced beside (0.15 to 0.19, `validate_args`).
_OLDEST: Final = "2.8.0"


def too_old_engine(args: Namespace) -> str | None:
    """Return one line where layers of Transformer Engine cannot leave anything for a second half."""
    if getattr(args, "transformer_impl", None) != "transformer_engine":
        return None
    from megatron.core.utils import get_te_version, is_te_min_version

    if get_te_version() is None or is_te_min_version(_OLDEST):
        return None
    return (
        f"Transformer Engine {get_te_version()} computes weight gradients in the first half of a backward, so that the "
        f"second has little to do: use {_OLDEST} or newer, or --transformer-impl local"
    )


def delayed_gradients() -> PatchSet:
    """The patch under which a script's layers and data parallelism are made with delayed weight gradients."""
    patch = training_patch(
        "delayed weight gradients",
        "megatron.training.arguments:core_transformer_config_from_args",
        _delaying,
        "Megatron's check of the setting, which layers are made by, allows it with another schedule only",
    )
    return PatchSet("delayed weight gradients", [patch], DELAYED)


def _delaying(original: Callable[..., Any], args: Namespace, *more: Any, **others: Any) -> Any:
    args.delay_wgrad_compute = False
    config = original(args, *more, **others)
    if getattr(args, "transformer_impl", None) == "transformer_engine" and too_old_engine(args) is None:
        config.delay_wgrad_compute = args.delay_wgrad_compute = True
    return config
