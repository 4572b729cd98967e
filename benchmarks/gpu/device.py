"""What one process has of its device: how fast memory goes to the host and back, and what a GPT layer takes.

Copies are of pinned memory, on a side stream each way. Predicted: of copies beside compute, that it does not notice; of
a layer, `evenpipe.report.bandwidth.forward_flops` at the speed of a matrix product of its shape, backward twice that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Final

import torch

from evenpipe.report.bandwidth import ModelShape, forward_flops
from evenpipe.runtime.timing import clock_for, matrix_flops
from evenpipe.train.options import TrainOptions
from evenpipe.train.transformer import initialised_piece

from .rank import Rank

__all__ = ["run"]

_WARM_UPS, _REPEATS = 3, 10
_WIDTHS: Final = ((1024, 2048, 4096), (64,))


def run(rank: Rank) -> None:
    _swap(rank)
    for hidden in rank.pick(*_WIDTHS):
        _layer(rank, hidden, rank.pick(2048, 32))


def _swap(rank: Rank) -> None:
    nbytes, on_gpu = rank.pick(1 << 28, 1 << 20), rank.device.type == "cuda"
    hosts = [torch.ones(nbytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    devices = [host.to(rank.device, copy=True) for host in hosts]
    streams = [torch.cuda.Stream(rank.device) if on_gpu else None for _ in range(2)]
    left = torch.randn(rank.pick(8192, 64), rank.pick(8192, 64), device=rank.device, dtype=torch.bfloat16)
    product = torch.empty_like(left)

    def out() -> None:
        with torch.cuda.stream(streams[0]):
            hosts[0].copy_(devices[0], non_blocking=True)

    def back() -> None:
        with torch.cuda.stream(streams[1]):
            devices[1].copy_(hosts[1], non_blocking=True)

    def multiply() -> None:
        for _ in range(4):
            torch.matmul(left, left, out=product)

    def seconds(*works: Callable[[], None]) -> float:
        taken = []
        for _ in range(_WARM_UPS + _REPEATS):
            start = time.perf_counter()
            for work in works:
                work()
            rank.synchronise()
            taken.append(time.perf_counter() - start)
        return median(taken[_WARM_UPS:])

    rank.row("swap to the host, alone", nbytes / seconds(out) / 1e9, "GB/s")
    rank.row("swap from the host, alone", nbytes / seconds(back) / 1e9, "GB/s")
    both = seconds(out, back)
    rank.row("swap both ways at once, together", 2 * nbytes / both / 1e9, "GB/s")
    ratio = seconds(out, back, multiply) / max(both, seconds(multiply))
    rank.row("swap beside matrix products / the longer of the two alone", ratio, "ratio", 1)


def _layer(rank: Rank, hidden: int, tokens: int) -> None:
    clock = clock_for(rank.device)
    options = TrainOptions.of(engine="module", hidden=hidden, heads=hidden // 64, seq_length=tokens)
    layer = initialised_piece(options, 256, 1).to(rank.device, torch.bfloat16)
    taken = torch.randn(1, tokens, hidden, device=rank.device, dtype=torch.bfloat16, requires_grad=True)
    times = []
    for _ in range(_WARM_UPS + _REPEATS):
        start = clock.mark()
        output = layer(taken)
        middle = clock.mark()
        output.backward(taken)
        end = clock.mark()
        times.append((clock.elapsed_ms(start, middle), clock.elapsed_ms(middle, end)))
    flops = matrix_flops(rank.device, torch.bfloat16, tokens, hidden, 4 * hidden)
    ideal_ms = forward_flops(ModelShape(1, hidden // 64, hidden, tokens), 1, 1, 1) / flops * 1e3
    forwards, backwards = zip(*times[_WARM_UPS:], strict=True)
    rank.row(f"forward of a layer, hidden size {hidden}, {tokens} tokens, bf16", median(forwards), "ms", ideal_ms)
    rank.row(f"backward of it, hidden size {hidden}", median(backwards), "ms", 2 * ideal_ms)
    rank.row(f"matrix product of its shape, hidden size {hidden}", flops / 1e12, "TFLOP/s")
