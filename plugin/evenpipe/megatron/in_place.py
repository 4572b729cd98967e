"""Refuse Megatron's settings that do not go together with steps in place (paci), in one line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from evenpipe.megatron.unsupported import Refusal, refusals_of

__all__ = ["refused_in_place"]

_BY_ALL = ("clip_grad", "fp16", "loss_scale", "calculate_per_token_loss", "grad_norm_skip_threshold")
_WAITS = "decides a step by all stages' gradients, and under paci a stage steps before the stages ahead end the batch"
_IN_PLACE: Mapping[str, str] = {
    **dict.fromkeys(_BY_ALL, _WAITS),
    **dict.fromkeys(("fp8", "fp4"), "keeps quantised copies of weights, which paci changes amid their micro-batches"),
    **dict.fromkeys(("num_experts", "num_moe_experts"), "has not been shown to train by paci's rule"),
}
_NEEDED: Mapping[str, str] = {
    "untie_embeddings_and_output_weights": "ties a weight over stages, whose step waits for another stage's gradient",
}


def refused_in_place(settings: Any) -> Iterator[Refusal]:
    """Yield a refusal for each of the `settings` that a stage which steps by itself cannot honour.

    `settings` are a configuration of Megatron's model or optimizer, or Megatron's arguments.
    """
    yield from refusals_of(settings, _IN_PLACE, "turn it off, or use 2bw")
    yield from refusals_of(settings, _NEEDED, "add it, or use 2bw")
