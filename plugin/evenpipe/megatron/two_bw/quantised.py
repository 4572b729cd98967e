"""FP8 and FP4 of Transformer Engine under 2BW: each batch's quantised weights, and the scales that it began with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from evenpipe.megatron.two_bw_symbols import QUANTISED
from evenpipe.upstream import UpstreamError, verify

__all__ = ["Quantised"]

_RANGES: Final = ("global_amax_history_buffer", "global_scale_buffer")
_RECOMPUTED: Final = "fp8_tensors_recompute_buffer"


class Quantised:
    """The quantised copies of one stage's weights, and its scales by delayed scaling, by batch.

    A layer of Transformer Engine quantises its weight in the first micro-batch of a batch, and keeps the copy for the
    others and for their backwards (`_fp8_workspaces`). Under 2BW the next batch, on other weights, begins before these
    backwards, so each batch has copies of its own: two of each weight while two batches are under way.

    By delayed scaling, a forward quantises by the largest values of the forwards before it, a backward by those of the
    backwards before it. Both go in the order of micro-batches, as without 2BW. Where the forwards of the next batch are
    dropped, histories and scales become again what they were before these. All other recipes scale a value by itself,
    and have no state.
    """

    def __init__(self, model: Sequence[Any]) -> None:
        modules = (module for chunk in model for module in chunk.modules())
        self._modules = [module for module in modules if hasattr(module, "_fp8_workspaces")]
        self._copies: dict[int, list[dict[str, Any]]] = {}  # by batch
        self._before: list[Tensor] = []  # of the newest batch
        self._present: int | None = None
        if self._modules:
            _check_engine()

    def use(self, batch: int) -> None:
        """Have layers quantise and look up the weights of `batch` from now on."""
        if batch == self._present or not self._modules:
            return
        self._present = batch
        if batch not in self._copies:
            self._copies = {other: copies for other, copies in self._copies.items() if other == batch - 1}
            self._copies[batch] = [{} for _ in self._modules]
            self._before = [tensor.clone() for tensor in _ranges()]
        for module, copies in zip(self._modules, self._copies[batch], strict=True):
            module._fp8_workspaces = copies

    def gather(self, batch: int) -> None:
        """Nothing is brought to other stages."""

    @torch.no_grad()
    def drop(self, first: int) -> None:
        """Forget the copies of `first`, and what its forwards have left in histories and scales."""
        if self._copies.pop(first, None) is not None:
            for tensor, before in zip(_ranges(), self._before, strict=False):
                tensor.copy_(before)
            # Of forwards that are computed again in their backward: all others have been by now.
            for queue in getattr(_engine(), _RECOMPUTED):
                queue.clear()
        self._present = None


def _ranges() -> Iterator[Tensor]:
    """Yield, for all that forwards quantise by delayed scaling, the largest values so far and the present scales."""
    engine = _engine()
    for name in _RANGES:
        for key, tensors in getattr(engine, name).items():
            if key.startswith("forward"):
                yield from tensors


def _engine() -> Any:
    """Return what has Transformer Engine's global FP8 state: since 2.15 an attribute of its manager."""
    manager = import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager
    return getattr(manager, "quantization_state", manager)


def _check_engine() -> None:
    """Raise UpstreamError for a release of Transformer Engine that keeps this state otherwise."""
    verify(QUANTISED)
    missing = [name for name in (*_RANGES, _RECOMPUTED) if not hasattr(_engine(), name)]
    # Before 2.0, scales had their inverses beside them.
    if missing or hasattr(_engine(), "global_scale_inv_buffer"):
        raise UpstreamError(
            f"2bw: FP8GlobalStateManager of Transformer Engine has {missing[0] if missing else 'its scales'} elsewhere "
            "than in 2.0 to 2.18: install one of these, or use --evenpipe-schedule 1f1b"
        )
