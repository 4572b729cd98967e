"""EvenPipe's schedules, in its engine for plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Final

import torch

from evenpipe.order_search.costs import Part as PartCosts
from evenpipe.order_search.costs import RunCosts
from evenpipe.order_search.search import Effort
from evenpipe.runtime.resources import StageFigures
from evenpipe.schedule import Program, Size, build, find
from evenpipe.simulate.searched import searched
from evenpipe.torch.pipeline import ModulePipeline
from evenpipe.torch.two_bw import TwoBWTraining
from peer_engines.engine import Bench, Peer, Ran, twice_as_many
from peer_engines.part import Part, Setting, boundary

__all__ = ["PEERS"]

#: Of each search, and of a message of 1 MiB between processes that share two cores.
_EFFORT: Final = Effort(10.0)
_MESSAGE_MS: Final = 2.0


class _Ran(Ran):
    def __init__(self, bench: Bench, program: Program, bpipe: bool = False) -> None:
        super().__init__(bench.live)
        setting = bench.setting
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


def _peer(
    title: str,
    schedule: str,
    bpipe: bool = False,
    chunks: int = 1,
    group_size: int = 1,
    why_not: Callable[[Setting], str | None] = lambda setting: None,
) -> Peer:
    def ran(bench: Bench) -> _Ran:
        size = Size(bench.setting.stages, bench.setting.micro_batches, chunks, group_size)
        return _Ran(bench, build(schedule, size, bpipe), bpipe)

    return Peer("EvenPipe", title, ran, why_not, delayed="stream" in find(schedule).needs)


@cache
def _found(setting: Setting, memory: int) -> Program:
    """Return a schedule searched for the setting's times; each stage has room for `memory` micro-batches."""
    count = 2 * setting.stages
    parts = [
        PartCosts(
            forward_ms=setting.forward_ms * share,
            input_gradient_ms=setting.input_ms * share,
            weight_gradient_ms=setting.weight_ms * share,
            saved_bytes=setting.saved_bytes // 2,
        )
        for share in (setting.share(position, 2) for position in range(count))
    ]
    caps = [memory * setting.saved_bytes] * setting.stages
    costs = RunCosts(format="evenpipe.costs/1", placement="vee", parts=parts, message_ms=_MESSAGE_MS, memory_bytes=caps)
    return searched(costs, setting.stages, setting.micro_batches, _EFFORT).program


def _searched(title: str, memory: Callable[[Setting], int]) -> Peer:
    return Peer(
        "EvenPipe",
        title,
        lambda bench: _Ran(bench, _found(bench.setting, memory(bench.setting))),
        prepare=lambda setting: _found(setting, memory(setting)),
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
    _peer("ZB-H2", "zb-h2"),
    _peer("ZBV", "zbv", chunks=2),
    _peer("V-Half", "v-half", chunks=2),
    _peer("V-Min", "v-min", chunks=2),
    _peer("DualPipeV", "dualpipev", chunks=2, why_not=twice_as_many),
    _searched("searched", lambda setting: min(setting.stages, setting.micro_batches)),
    _searched("searched, V-Half's memory", lambda setting: min(setting.stages // 2 + 1, setting.micro_batches)),
)
