"""Four gloo processes, a pipeline of as many stages, that tune with BPipe: as they are, then with a slow eviction.

Argument: a folder (stage-<stage>.json out). A script of its own, forked after the imports: they cost seconds each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from evenpipe.planner.grouped import GroupedSchedule
from evenpipe.planner.memory import Measured
from evenpipe.runtime.channel import Channel, Transfer
from evenpipe.runtime.connections import Connections, connect
from evenpipe.runtime.executor import Executor
from evenpipe.schedule import Link, Programs, links, loop
from evenpipe.tuner.loop import AdaptiveLoop

STAGES, SAMPLES, LIMIT = 4, 8, 10**9
SLOW_GBPS = 0.01
CPU = torch.device("cpu")


class Slow(Channel):
    """Takes its time for every byte."""

    def send(self, tensors: Sequence[Tensor]) -> Transfer:
        time.sleep(sum(tensor.nbytes for tensor in tensors) / (SLOW_GBPS * 1e9))
        return super().send(tensors)


def tuned(stage: int, connections: Connections) -> Any:
    """The state after a decision; a micro-batch takes 1 and 2 s and saves 60 MB, and 1 MB more on each later stage."""
    executor = Executor(stage, connections, CPU)
    loop = AdaptiveLoop(None, lambda line: None, lambda goes_on: None, alone=True)
    loop.start(GroupedSchedule(Programs("kfkb", True), STAGES), SAMPLES, [1], LIMIT)
    loop.take(Measured(1000, 2000, 60e6 + stage * 1e6, 0, 64, 0, 0), executor, 0)
    loop.choose(executor, 0, SAMPLES)
    assert loop.tuner is not None
    return loop.tuner.state_dict() | {"estimates_ms": loop.tuner.retunes[0].estimates_ms}


def main(stage: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=stage, world_size=STAGES)
    connections = connect(range(STAGES), links(loop(STAGES), pairs=True), "gloo", CPU)
    channels = dict(connections.channels)
    if stage == 0:
        evict = Link("evict", 0, 3)
        channels[evict] = Slow(0, 3, channels[evict]._group, CPU)
    found = [tuned(stage, one) for one in (connections, replace(connections, channels=channels))]
    (folder / f"stage-{stage}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    mp.start_processes(main, args=(Path(sys.argv[1]),), nprocs=STAGES, start_method="fork")
