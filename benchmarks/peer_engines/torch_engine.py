"""torch.distributed.pipelining's schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from peer_engines.engine import Bench, Peer, Ran, twice_as_many
from peer_engines.part import Part, boundary

__all__ = ["PEERS"]


class _Ran(Ran):
    def __init__(self, bench: Bench, schedule: Any, positions: list[int]) -> None:
        super().__init__(bench.live)
        setting, chunks = bench.setting, len(positions)
        count = setting.stages * chunks
        # Its first step would run the parts to learn the shapes, so they are told.
        stages = [
            pipelining.PipelineStage(
                Part(setting, position, chunks, bench.accelerator, bench.live),
                position,
                count,
                torch.device("cpu"),
                input_args=boundary().requires_grad_(position > 0),
                output_args=boundary().requires_grad_(),
                output_grads=boundary() if position < count - 1 else None,
                input_grads=boundary() if position else None,
            )
            for position in positions
        ]
        self._schedule = schedule(
            stages if issubclass(schedule, schedules.PipelineScheduleMulti) else stages[0],
            setting.micro_batches,
            loss_fn=lambda output, _: output.mean(),
        )
        whole = torch.cat([boundary()] * setting.micro_batches)
        self._inputs = [whole] if 0 in positions else []
        self._target = {"target": whole} if count - 1 in positions else {}

    def batch(self) -> None:
        losses: list[Any] = []
        self._schedule.step(*self._inputs, **self._target, losses=losses, return_outputs=False)


def _alone(bench: Bench) -> list[int]:
    return [bench.rank]


def _loop(bench: Bench) -> list[int]:
    return [bench.rank, bench.rank + bench.setting.stages]


def _vee(bench: Bench) -> list[int]:
    return [bench.rank, 2 * bench.setting.stages - 1 - bench.rank]


def _peer(title: str, schedule: Any, positions: Callable[[Bench], list[int]], why_not: Any = None) -> Peer:
    return Peer(
        "torch", title, lambda bench: _Ran(bench, schedule, positions(bench)), why_not or (lambda setting: None)
    )


PEERS = (
    _peer("GPipe", schedules.ScheduleGPipe, _alone),
    _peer("1F1B", schedules.Schedule1F1B, _alone),
    _peer("Interleaved1F1B", schedules.ScheduleInterleaved1F1B, _loop),
    _peer("InterleavedZeroBubble", schedules.ScheduleInterleavedZeroBubble, _loop),
    _peer("ZBVZeroBubble", schedules.ScheduleZBVZeroBubble, _vee),
    _peer("DualPipeV", schedules.ScheduleDualPipeV, _vee, twice_as_many),
)
