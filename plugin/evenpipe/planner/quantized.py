"""Products in 8 and 4 bits: what Transformer Engine's recipes read, write, keep and send for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from evenpipe.descriptions import Rate

__all__ = ["QUANTIZATIONS", "Quantization", "Quantized"]

#: As Megatron's `--fp8-recipe` and `--fp4-recipe` name them.
Quantized = Literal["tensorwise", "delayed", "blockwise", "mxfp8", "nvfp4"]


@dataclass(frozen=True)
class Quantization:
    """How linear layers compute; embeddings, the router and the head stay in the run's precision.

    rate: the device's that its products have. element_bytes: of an operand, its scales included. cast_bytes: read and
    written for an element that a product, and its use in the backward, take; kernels: that do it. transposing_bytes: on
    top where a device's products want both operands with the summed dimension last, so that values are kept twice;
    both_ways: they are on every device, as scales of rows do not serve columns. behind_norm_bytes: instead of
    ``cast_bytes`` where the norm before it writes the operand. gathered_bytes: of a parameter, where parameters are
    kept quantized; None: they cannot be. in_the_open: such parameters are gathered in the run's precision and cast
    then, beside no compute. by_expert: a kernel casts the tokens of one expert only.
    """

    rate: Rate
    element_bytes: float
    cast_bytes: float
    kernels: int
    transposing_bytes: float = 0.0
    behind_norm_bytes: float | None = None
    gathered_bytes: float | None = 1.0
    in_the_open: bool = False
    both_ways: bool = False
    by_expert: bool = False

    def weight_bytes(self, transposing: bool) -> float:
        """Return what a quantized weight takes, on a device that is ``transposing`` or not."""
        return self.element_bytes * (2 if transposing or self.both_ways else 1)


#: Counted from what a recipe must do. tensorwise: the largest value first (2), then the cast (2 + 1), and a transposed
#: copy (1 + 1, on Hopper). delayed has the scale from before. blockwise, mxfp8: both copies in one pass (2 + 1 + 1, and
#: scales: one byte for 32 values). nvfp4 has the largest value and a Hadamard transform besides. The recipes:
#: Transformer Engine's user guide, "Using FP8 and FP4".
QUANTIZATIONS: Final[Mapping[Quantized, Quantization]] = {
    "tensorwise": Quantization("fp8", 1.0, 6.0, 3, transposing_bytes=2.0, by_expert=True),
    "delayed": Quantization("fp8", 1.0, 4.0, 1, by_expert=True),
    "blockwise": Quantization("fp8", 1.03, 4.06, 1, both_ways=True),
    "mxfp8": Quantization("fp8", 1.03, 4.06, 1, behind_norm_bytes=2.1, in_the_open=True, both_ways=True),
    "nvfp4": Quantization("fp4", 0.56, 6.2, 3, gathered_bytes=None, both_ways=True),
}
