"""Muon for the matrices of a model, and AdamW for the rest of it, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["MuonWithAdamW"]


class MuonWithAdamW(torch.optim.Optimizer):
    """Steps `matrices` by torch's Muon, and `others` (embeddings, the output layer, vectors) by AdamW.

    Both have the same learning rate: Muon's update is scaled to the size of AdamW's (`match_rms_adamw`, Liu et al.,
    *Muon is Scalable for LLM Training*, 2025, equation 4). Each of `others` is a parameter group as torch takes them.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], others: Sequence[dict[str, Any]], lr: float, weight_decay: float
    ) -> None:
        muon = torch.optim.Muon([*matrices], lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW([*others], lr=lr)
        groups = [
            {**group, "matrices": optimizer is muon} for optimizer in (muon, adamw) for group in optimizer.param_groups
        ]
        super().__init__(groups, {"lr": lr})
        self._muon: torch.optim.Optimizer = muon
        self._adamw: torch.optim.Optimizer = adamw

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step by both; there is no loss to compute again."""
        assert closure is None, "neither needs one"
        for optimizer in (self._muon, self._adamw):
            # Groups and state are this optimizer's, and are replaced where a checkpoint is loaded.
            of_matrices = optimizer is self._muon
            optimizer.param_groups = [group for group in self.param_groups if group["matrices"] == of_matrices]
            optimizer.state = self.state
            optimizer.step()
