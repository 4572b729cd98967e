"""What the oracle found; light, since the process that asks for it imports no Megatron."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Trained"]


class Trained(NamedTuple):
    """`losses` and `grad_norms` (before clipping) are of each batch; `weights` are the last ones, by stage and name."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    weights_sha256: str
    weights: list[dict[str, npt.NDArray[np.float32]]]
