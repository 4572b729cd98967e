"""Runs the oracle in a process of its own: Megatron is patched there for the CPU, and keeps global state."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from evenpipe.train.engines import ENGINES
from evenpipe.train.launch import _context
from evenpipe.train.options import TrainOptions

__all__ = ["Case", "Trained", "train_cases"]


class Trained(NamedTuple):
    """`losses` and `grad_norms` (before clipping) are of each batch; `weights` are the last ones, by stage and name."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    weights_sha256: str
    weights: list[dict[str, npt.NDArray[np.float32]]]


class Case(NamedTuple):
    """What the oracle is to train: the arguments of `train`."""

    options: TrainOptions
    delay: int
    norms_added_in: torch.dtype = torch.float64
    per_token: bool = False
    largest_norm: float = math.inf


def train_cases(
    cases: Sequence[Case], within: Callable[[], AbstractContextManager[object]] = nullcontext
) -> list[Trained]:
    """Train all in one new process, `within` a context; results in the order of the cases.

    It is forked from the server of the runs that the oracle is for, which has imported Megatron.
    """
    with ProcessPoolExecutor(1, _context("cpu", ENGINES["evenpipe"].path)) as pool:
        return pool.submit(_train_all, cases, within).result()


def _train_all(cases: Sequence[Case], within: Callable[[], AbstractContextManager[object]]) -> list[Trained]:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from evenpipe.megatron.cpu_mode import cpu_mode
    from tests.oracle.training import train

    torch.set_num_threads(1)
    cpu_mode().apply()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    with within():
        return [train(*case) for case in cases]
