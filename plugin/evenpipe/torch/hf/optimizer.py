"""The optimizer that transformers' `Trainer` would make for a stage's parameters."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from evenpipe.torch.hf.loading import transformers
from evenpipe.torch.planned import PlannedPipeline

__all__ = ["adamw", "weight_groups"]

_UNDECAYED: Final = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def weight_groups(model: nn.Module, pipeline: PlannedPipeline, args: Any) -> list[dict[str, Any]]:
    """Return this stage's parameters in two groups: with the arguments' weight decay, and without any."""
    names: Any = transformers().trainer_pt_utils.get_parameter_names(model, [nn.LayerNorm], _UNDECAYED)
    decayed = set(names)
    mine = [(name, one) for name, one in pipeline.named_parameters() if one.requires_grad]
    return [
        {"params": [one for name, one in mine if name in decayed], "weight_decay": args.weight_decay},
        {"params": [one for name, one in mine if name not in decayed], "weight_decay": 0.0},
    ]


def adamw(args: Any, groups: Any) -> torch.optim.Optimizer:
    """Return an AdamW with the arguments' settings."""
    return torch.optim.AdamW(
        groups,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=args.optim == "adamw_torch_fused",
    )
