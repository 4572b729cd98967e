"""DeepSpeed's schedules."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from peer_engines.engine import Bench, Peer, Ran, twice_as_many
from peer_engines.part import Part, boundary

# Read when DeepSpeed is imported.
os.environ["DS_ACCELERATOR"] = "cpu"
with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
    warnings.simplefilter("ignore")
    import deepspeed
    from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule

__all__ = ["PEERS", "quiet", "start"]


def quiet(rank: int) -> None:
    """What DeepSpeed prints, at each batch too, is no result."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def start() -> None:
    """Once in each process, in a world of gloo."""
    # DeepSpeed would compile a shared-memory all-reduce.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")


def _loss(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


class _Ran(Ran):
    def __init__(self, bench: Bench, module: Any, chunks: int) -> None:
        super().__init__(bench.live)
        setting = bench.setting
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": setting.micro_batches,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "steps_per_print": 1_000_000,
        }
        net = module(
            [
                LayerSpec(Part, setting, position, chunks, bench.accelerator, bench.live)
                for position in range(setting.stages * chunks)
            ],
            num_stages=setting.stages,
            loss_fn=_loss,
            partition_method="uniform",
        )
        learning = [one for one in net.parameters() if one.requires_grad]
        self._engine, *_ = deepspeed.initialize(model=net, model_parameters=learning, config=config)
        self._data = itertools.repeat((boundary(), torch.zeros(1)))

    def batch(self) -> None:
        self._engine.train_batch(self._data)

    def close(self) -> None:
        self._engine.destroy()


PEERS = (
    Peer("DeepSpeed", "1F1B", lambda bench: _Ran(bench, PipelineModule, 1)),
    Peer("DeepSpeed", "DualPipeV", lambda bench: _Ran(bench, DualPipeVModule, 2), twice_as_many),
)
