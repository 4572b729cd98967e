"""Megatron-core's schedules."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
from torch import Tensor

from peer_engines.engine import Bench, Peer, Ran
from peer_engines.part import BOUNDARY, Part, boundary

with warnings.catch_warnings():
    # megatron-core warns of every optional package that is missing; none is needed here.
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_pipelining_with_interleaving,
        forward_backward_pipelining_without_interleaving,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["PEERS", "start"]


def start(stages: int) -> None:
    """Once in each process, in CPU mode."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)


class _Chunk(torch.nn.Module):
    """A part as Megatron's schedules know models."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, part: Part, config: TransformerConfig, is_first: bool, is_last: bool, chunk: int) -> None:
        super().__init__()
        self.config, self.is_last, self.vp_stage = config, is_last, chunk
        self._part, self._is_first = part, is_first
        self._received: Tensor | None = None

    def set_input_tensor(self, received: Any) -> None:
        self._received = received[0] if isinstance(received, list) else received

    def forward(self, given: Tensor) -> Tensor:
        taken = given if self._is_first else self._received
        assert taken is not None, "the schedule has set it"
        output: Tensor = self._part(taken)
        return output


def _step(iterator: Any, model: _Chunk) -> Any:
    return model(next(iterator)), lambda output: (output.mean(), {})


class _Ran(Ran):
    def __init__(self, bench: Bench, chunks: int) -> None:
        super().__init__(bench.live)
        setting = bench.setting
        self._count = setting.micro_batches
        config = TransformerConfig(
            num_layers=setting.stages * chunks,
            hidden_size=BOUNDARY[2],
            num_attention_heads=1,
            pipeline_model_parallel_size=setting.stages,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            pipeline_dtype=torch.float32,
            overlap_p2p_comm=chunks > 1,
            batch_p2p_comm=chunks == 1,
            deallocate_pipeline_outputs=True,
        )
        positions = [bench.rank + chunk * setting.stages for chunk in range(chunks)]
        last = setting.stages * chunks - 1
        self._chunks = [
            _Chunk(
                Part(setting, position, chunks, bench.accelerator, bench.live),
                config,
                position == 0,
                position == last,
                chunk,
            )
            for chunk, position in enumerate(positions)
        ]

    def batch(self) -> None:
        several = len(self._chunks) > 1
        parallel_state.set_virtual_pipeline_model_parallel_world_size(len(self._chunks) if several else None)
        parallel_state.set_virtual_pipeline_model_parallel_rank(0 if several else None)
        data = [itertools.repeat(boundary()) for _ in self._chunks]
        function = (
            forward_backward_pipelining_with_interleaving
            if several
            else forward_backward_pipelining_without_interleaving
        )
        function(
            forward_step_func=_step,
            data_iterator=data if several else data[0],
            model=self._chunks if several else self._chunks[0],
            num_microbatches=self._count,
            seq_length=BOUNDARY[0],
            micro_batch_size=BOUNDARY[1],
        )

    def close(self) -> None:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
        parallel_state.set_virtual_pipeline_model_parallel_rank(None)


PEERS = (
    Peer("Megatron", "1F1B", lambda bench: _Ran(bench, 1)),
    Peer("Megatron", "interleaved", lambda bench: _Ran(bench, 2)),
)
