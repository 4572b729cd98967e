"""What the stages of 1F1B hold in steady state as the allocator counts it, with BPipe and without, and what that costs.

Of two stages BPipe has nothing to evict under 1F1B: there they are those of kFkB, with a k that leaves it something.

The argument is the engine. Saved activations are predicted by the simulator from what one micro-batch saves; active
memory, for "module" by that and what stays from batch to batch, for "evenpipe" by the planner from the options alone.
All leave out what an operation takes only while it runs. Of time the prediction is that transfers are hidden.
"""

from __future__ import annotations

from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist

from evenpipe.runtime.communicators import link_bytes
from evenpipe.schedule import Programs, links, loop
from evenpipe.train.engine import engine_module
from evenpipe.train.machine import stage_memory
from evenpipe.train.options import TrainOptions
from evenpipe.train.predict import predict
from evenpipe.tuner.group_memory import peak_bytes
from evenpipe.tuner.grouped import Candidate, GroupedSchedule

from .rank import Rank
from .training import evicting_group, options_of, train

__all__ = ["run"]

_MIB: Final = 2**20
_SIZES: Final = (
    {"hidden": 1024, "heads": 16, "seq_length": 1024, "iterations": 6},
    {"hidden": 32, "seq_length": 32, "iterations": 3},
)
_STEADY: Final = 2  # batches after which nothing new is needed


def run(rank: Rank, engine: str) -> None:
    engine_module(engine).prepare(rank.device)
    given: dict[str, Any] = {**rank.pick(*_SIZES), "engine": engine, "layers": 8, "precision": "bf16"}
    given |= {"micro_batches": 8, "stages": rank.ranks}
    name = "1f1b"
    if options_of(rank, "1f1b with BPipe", **given, bpipe=True) is None:
        k = evicting_group(rank.ranks)
        name = f"{k}F{k}B"
        given |= {"schedule": "kfkb", "group_size": k, "micro_batches": 4 * k}
    taken_ms = []
    for bpipe in (False, True):
        taken_ms.append(_measure(rank, TrainOptions.of(**given, bpipe=bpipe), name + " with BPipe" * bpipe))
    if rank.number == 0:
        rank.row("iteration with BPipe / without", taken_ms[1] / taken_ms[0], "ratio", 1)
    if rank.place == "cpu":
        rank.unchecked("active and reserved memory, calls of cudaMalloc", "there is no GPU")
    if rank.place.endswith("shared"):
        rank.unchecked("transfers between GPUs beside compute", "the stages share one GPU and its bus")


def _measure(rank: Rank, options: TrainOptions, name: str) -> float:
    """The rows of one run; what an iteration takes, in milliseconds."""
    on_gpu = rank.device.type == "cuda"
    own: dict[str, float] = {}

    def after(engine: Any, done: int) -> None:
        own["static"] = engine.kept_bytes().static_bytes / _MIB
        stats = torch.cuda.memory_stats() if on_gpu else {}
        if on_gpu and done == _STEADY:
            own["calls"] = stats["num_device_alloc"]
            torch.cuda.reset_peak_memory_stats()
        if done == options.iterations:
            if options.engine == "module":
                own["waited"] = engine.pipeline.executor.exposed.total_ms()
            if on_gpu:
                own["calls"] = stats["num_device_alloc"] - own["calls"]
                own.update({kind: stats[f"{kind}_bytes.all.peak"] / _MIB for kind in ("active", "reserved")})

    result = train(rank, options, after=after)
    every: list[Any] = [None] * rank.ranks
    with rank.world(rank.ranks):
        dist.all_gather_object(every, own)
    if result is None:
        return 0.0
    of_stages = {key: [stage[key] for stage in every] for key in own}
    saved = [stage.peak_bytes / _MIB for stage in predict(options.program, result).stages]
    rank.row(f"{name}: saved activations", [stage.peak_saved_bytes / _MIB for stage in result.stages], "MiB", saved)
    if options.engine == "evenpipe":
        expected = _planned(rank, options)
    else:
        expected = [sum(both) for both in zip(of_stages["static"], saved, strict=True)]
        rank.row(f"{name}: the last iteration waits for evictions and loads", of_stages["waited"], "ms", 0)
    if on_gpu:
        rank.row(f"{name}: active memory", of_stages["active"], "MiB", expected)
        rank.row(f"{name}: reserved memory", of_stages["reserved"], "MiB")
        rank.row(f"{name}: calls of cudaMalloc after batch {_STEADY}", of_stages["calls"], "calls", 0)
    took_ms = median(result.iteration_ms[_STEADY:])
    rank.row(f"{name}: an iteration", took_ms, "ms")
    return took_ms


def _planned(rank: Rank, options: TrainOptions) -> list[float]:
    """What `evenpipe candidates` would say, in MiB, less the communicators, which are not torch's memory."""
    memory = stage_memory(options, rank.device.type)
    schedule = GroupedSchedule(Programs("kfkb", options.bpipe), options.stages)
    assert isinstance(options.group_size, int)
    peaks = peak_bytes(memory, Candidate(options.group_size, options.micro_batch_size, options.micro_batches), schedule)
    joined = links(loop(options.stages), options.bpipe) if rank.place != "cpu" else ()
    return [(peak - link_bytes(joined, stage)) / _MIB for stage, peak in enumerate(peaks)]
