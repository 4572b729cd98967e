"""Activation checkpointing whose saved tensors can be evicted."""

from __future__ import annotations

import functools
from typing import Any

import torch.utils.checkpoint
from deepspeed.runtime.activation_checkpointing import checkpointing

from evenpipe.deepspeed.told import tell

__all__ = ["show_saved_tensors"]


def show_saved_tensors(module: Any) -> None:
    """Checkpoint the layers of a PipelineModule with torch's function in the place of DeepSpeed's.

    DeepSpeed's keep the inputs of a checkpointed layer in attributes and closures, where nobody sees them; torch's
    saves them as autograd does. A function of the user's own stays.
    """
    if module.activation_checkpoint_func not in (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint):
        return
    module.activation_checkpoint_func = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    if module.activation_checkpoint_interval > 0:
        # Which layers are checkpointed depends on the function.
        module.is_checkpointable_results_interval = None
        module._precompute_checkpointable_values()
        tell(
            "bpipe: activation checkpointing goes through torch.utils.checkpoint, as DeepSpeed's own hides what it "
            "saves"
        )
