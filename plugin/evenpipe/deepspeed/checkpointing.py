"""Activation checkpointing whose saved tensors can be evicted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from evenpipe.deepspeed.supported import CHECKPOINTS, DEEPSPEED, recorded
from evenpipe.upstream import Patch, PatchSet

__all__ = ["checkpointing_patches", "show_saved_tensors"]


def checkpointing_patches() -> PatchSet:
    """Return what `show_saved_tensors` applies, for the rest of the process."""
    return PatchSet(
        "deepspeed-checkpointing",
        [
            Patch(
                name=symbol.partition(":")[2],
                targets=(symbol,),
                distribution=DEEPSPEED,
                versions=recorded(symbol),
                replacement=_through_torch,
                reason="keeps the inputs of a layer in attributes and closures, where what is saved cannot be seen",
                rebinds=True,
            )
            for symbol in CHECKPOINTS
        ],
    )


def show_saved_tensors(module: Any) -> None:
    """Have DeepSpeed's two functions, for a PipelineModule and for layers that call them, checkpoint as torch's does.

    A function of the user's own stays.
    """
    from deepspeed.runtime.activation_checkpointing import checkpointing

    checkpointing_patches().apply_once()
    functions = [getattr(checkpointing, symbol.partition(":")[2]) for symbol in CHECKPOINTS]
    routed = {function.__wrapped__: function for function in functions}
    # Which layers are checkpointed depends on the function; it has been found out, and stays.
    module.activation_checkpoint_func = routed.get(module.activation_checkpoint_func, module.activation_checkpoint_func)


def _through_torch(original: Callable[..., Any]) -> Callable[..., Any]:
    from torch import is_tensor
    from torch.utils.checkpoint import checkpoint

    from evenpipe.deepspeed.log import print_once

    # Once: which of a model's layers call it, and when, is the model's business.
    explain = functools.cache(print_once)

    @functools.wraps(original)
    def through_torch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        explain("activation checkpointing goes through torch.utils.checkpoint, as DeepSpeed's own hides what it saves")
        outputs = checkpoint(function, *args, use_reentrant=False, **kwargs)
        if is_tensor(outputs):
            return outputs
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return through_torch
