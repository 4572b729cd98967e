"""How transformers' `Trainer` counts the labels of a batch for a model."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from evenpipe.torch.hf.loading import transformers

__all__ = ["may_count", "shifts_labels"]


def may_count(model: nn.Module) -> bool:
    """Return whether `Trainer` would give the model the batch's number of tokens."""
    accepts = getattr(model, "accepts_loss_kwargs", None)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(model.forward).parameters.values())
    return takes_any if accepts is None else bool(accepts)


def shifts_labels(model: nn.Module) -> bool:
    """Return whether `Trainer` leaves out the first label, whose token follows no other."""
    losses: Any = transformers().loss.loss_utils
    loss = losses.LOSS_MAPPING.get(getattr(model, "loss_type", None))
    return loss is losses.ForCausalLMLoss and not getattr(model.config, "is_encoder_decoder", False)
