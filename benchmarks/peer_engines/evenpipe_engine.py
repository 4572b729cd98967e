"""EvenPipe's schedules, in its engine for plain torch."""

from __future__ import annotations

import itertools

import torch

from evenpipe.runtime.resources import StageFigures
from evenpipe.schedule import Size, build, find
from evenpipe.torch.pipeline import ModulePipeline
from evenpipe.torch.two_bw import TwoBWTraining
from peer_engines.engine import Bench, Peer, Ran
from peer_engines.part import Part, boundary

__all__ = ["PEERS"]


class _Ran(Ran):
    def __init__(self, bench: Bench, schedule: str, bpipe: bool, chunks: int, group_size: int) -> None:
        super().__init__(bench.live)
        setting = bench.setting
        program = build(schedule, Size(setting.stages, setting.micro_batches, chunks, group_size), bpipe)
        parts = program.schedule.chunks
        self._paired = bpipe
        self._pipeline = ModulePipeline(
            lambda position: Part(setting, position, parts, bench.accelerator, bench.live),
            program,
            lambda output, _: output.mean(),
            boundary(),
            measure=True,
        )
        self._batch = [boundary()] * setting.micro_batches, [None] * setting.micro_batches
        self._stream: TwoBWTraining | None = None
        if self._pipeline.versions is not None:
            optimizer = torch.optim.SGD(self._pipeline.parameters(), lr=0.1)
            self._stream, self.around = self._pipeline.two_bw(itertools.repeat(self._batch), optimizer), 1

    def batch(self) -> None:
        if self._stream is not None:
            next(self._stream)
        else:
            self._pipeline.step(*self._batch)

    def rest(self) -> None:
        if self._stream is not None:
            self._stream.drain()

    def peak_bytes(self) -> int:
        counted = StageFigures.of(self._pipeline.executor).peak_bytes
        # What is evicted comes back in other memory than a part's own, and guests have theirs.
        if not self._paired and counted != self.live.peak:
            raise RuntimeError(f"EvenPipe counts {counted} bytes where its parts hold {self.live.peak}")
        return counted

    def close(self) -> None:
        self._pipeline.close()


def _peer(title: str, schedule: str, bpipe: bool = False, chunks: int = 1, group_size: int = 1) -> Peer:
    return Peer(
        "EvenPipe",
        title,
        lambda bench: _Ran(bench, schedule, bpipe, chunks, group_size),
        delayed="stream" in find(schedule).needs,
    )


PEERS = (
    _peer("GPipe", "gpipe"),
    _peer("1F1B", "1f1b"),
    _peer("1F1B + BPipe", "1f1b", bpipe=True),
    _peer("interleaved", "interleaved", chunks=2),
    _peer("interleaved + BPipe", "interleaved", chunks=2, bpipe=True),
    _peer("2F2B", "kfkb", group_size=2),
    _peer("2F2B + BPipe", "kfkb", group_size=2, bpipe=True),
    _peer("2BW", "2bw"),
    _peer("2BW + BPipe", "2bw", bpipe=True),
    _peer("ZB-H1", "zb-h1"),
    _peer("V-Half", "v-half"),
)
