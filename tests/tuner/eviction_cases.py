"""Four gloo processes, a pipeline of as many stages, that tune with BPipe: as they are, then with a slow eviction.

Argument: a folder (rank-<rank>.json out). A script of its own, forked after the imports: they cost seconds each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from evenpipe.runtime.connections import Connections, connect
from evenpipe.runtime.executor import Executor
from evenpipe.schedule import Link, Programs, links, loop
from evenpipe.tuner.group_memory import Measured
from evenpipe.tuner.grouped import GroupedSchedule
from evenpipe.tuner.loop import AdaptiveLoop

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.runtime.ranks import report
from tests.slow_links import slowed

STAGES, SAMPLES, LIMIT = 4, 8, 10**9
SLOW_GBPS = 0.001
CPU = torch.device("cpu")


def tuned(stage: int, connections: Connections) -> Any:
    """The state after a decision; a micro-batch takes 10 and 20 s and saves 60 MB, 1 MB more on each later stage."""
    executor = Executor(stage, connections, CPU)
    loop = AdaptiveLoop(None, lambda line: None, lambda goes_on: None, alone=True)
    loop.start(GroupedSchedule(Programs("kfkb", True), STAGES), SAMPLES, [1], LIMIT)
    loop.take(Measured(10_000, 20_000, 60e6 + stage * 1e6, 0, 64, 0, 0), executor, 0)
    loop.choose(executor, 0, SAMPLES)
    assert loop.tuner is not None
    return loop.tuner.state_dict() | {"estimates_ms": loop.tuner.retunes[0].estimates_ms}


def work(stage: int, folder: Path) -> list[Any]:
    connections = connect(range(STAGES), links(loop(STAGES), pairs=True), "gloo", CPU)
    slow = slowed(connections, Link("evict", 0, 3), SLOW_GBPS) if stage == 0 else connections
    return [tuned(stage, one) for one in (connections, slow)]


if __name__ == "__main__":
    report(STAGES, work)
