"""What an optimizer has not made yet."""

from __future__ import annotations

import torch

__all__ = ["bytes_to_come"]


def bytes_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that its first step will make: of parameters without a state, two averages of Adam's, or SGD's momentum."""
    return sum(
        (2 if "betas" in group else int(bool(group.get("momentum")))) * parameter.nbytes
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not optimizer.state.get(parameter)
    )
