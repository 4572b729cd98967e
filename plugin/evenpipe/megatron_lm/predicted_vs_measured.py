"""What a plan predicted of each stage's time and memory, beside what the script's run measures."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from evenpipe.layouts.written import WrittenLayout
from evenpipe.megatron.symbols import STATIC_MEMORY
from evenpipe.megatron_lm.hooks import set_up_patch
from evenpipe.megatron_lm.log import say_on_last_rank
from evenpipe.report.log_line import Taken, comparison_lines
from evenpipe.runtime.resources import StageFigures, per_stage
from evenpipe.upstream import PatchSet

__all__ = ["LayoutComparison", "comparison_patches"]


class LayoutComparison:
    """The comparison of a run of `plan` with its predictions; `args` are Megatron's.

    Apply `comparison_patches` before the model is made.
    """

    def __init__(self, plan: WrittenLayout, args: Namespace) -> None:
        self._plan = plan
        self._args = args
        self._static_bytes = 0

    def set_up(self, model: Sequence[Any], optimizer: Any) -> None:
        """Called by all ranks when Megatron has made model and optimizer."""
        from evenpipe.megatron.adaptive.static_memory import static_bytes

        if optimizer is not None:
            self._static_bytes = static_bytes(model, optimizer)

    def tell(self, mine: StageFigures, stage: int, device: torch.device) -> None:
        """Log a line a stage; all ranks call it after a batch that was measured."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        held = mine._replace(peak_bytes=mine.peak_bytes + self._static_bytes)
        stages = self._plan.stages
        measured = [
            Taken(figures.computed_ms / get_num_microbatches(), figures.peak_bytes)
            for figures in per_stage(held, stage, len(stages), device)
        ]
        predicted = [Taken(one.forward_ms + one.backward_ms, one.peak_bytes) for one in stages]
        for line in comparison_lines([", ".join(one.layers) for one in stages], predicted, measured):
            say_on_last_rank(line)


def comparison_patches(comparison: Any) -> PatchSet:
    """Return what calls `comparison` with Megatron's model and optimizer."""
    reason = "what model and optimizer hold counts in what a plan says of memory"
    return PatchSet("truth", [set_up_patch(comparison, "planned", reason)], STATIC_MEMORY)
