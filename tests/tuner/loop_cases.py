"""Two gloo processes, a pipeline of as many stages, that tune on measurements that are made up, and train nothing.

Argument: a folder (rank-<rank>.json out). A script of its own, forked after the imports.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from evenpipe.planner.divisors import divisors
from evenpipe.runtime.connections import connect
from evenpipe.runtime.executor import Executor
from evenpipe.schedule import Programs, links, loop
from evenpipe.tuner.group_memory import Measured, PlanError
from evenpipe.tuner.grouped import GroupedSchedule
from evenpipe.tuner.loop import AdaptiveLoop

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.runtime.ranks import report

STAGES, SAMPLES, LIMIT = 2, 4, 10_000
CPU = torch.device("cpu")


def measured(stage: int, size: int) -> Measured:
    return Measured(size, 2 * size, 100 * size + stage, 0, 64 * size, 0, 1000)


class Run:
    """One loop, and what it said."""

    def __init__(self, executor: Executor, interval: int = 2) -> None:
        self.said: list[Any] = []
        self.loop = AdaptiveLoop(interval, self.said.append, self.said.append, alone=True)
        self._executor = executor

    def measure(self, limit: int = LIMIT, iteration: int = 0, differ: bool = False) -> list[int]:
        """The sizes that were wanted: where micro-batches differ, of one sample each."""
        sizes = [1] if differ else divisors(SAMPLES)
        self.loop.start(GroupedSchedule(Programs("kfkb"), STAGES), SAMPLES, sizes, limit, differ)
        wanted = []
        while (size := self.loop.wanted) is not None:
            wanted.append(size)
            self.loop.take(measured(self._executor.stage_index, size), self._executor, iteration)
        return wanted

    def choose(self, iterations: range) -> list[tuple[int, ...]]:
        return [tuple(self.loop.choose(self._executor, iteration, SAMPLES)) for iteration in iterations]


def work(stage: int, folder: Path) -> dict[str, Any]:
    executor = Executor(stage, connect(range(STAGES), links(loop(STAGES)), "gloo", CPU), CPU)
    first = Run(executor)
    found: dict[str, Any] = {"before": first.loop.state_dict(), "wanted": first.measure()}
    found["chosen"] = first.choose(range(5))
    assert first.loop.tuner is not None
    found["decided"] = [retune.iteration for retune in first.loop.tuner.retunes]
    found["predicted"] = first.loop.predicted_saved_bytes
    found["state"] = first.loop.state_dict()

    later = Run(executor)
    later.loop.load_state_dict(json.loads(json.dumps(found["state"])))
    found["wanted later"] = later.measure(iteration=5)
    found["chosen later"] = later.choose(range(5, 7))

    other = Run(executor)
    other.loop.load_state_dict({**found["state"], "limit_bytes": LIMIT - 1})
    other.measure(iteration=5)
    other.choose(range(5, 6))
    found["said"] = [first.said, later.said, other.said]

    grows = Run(executor, interval=10)
    grows.measure(differ=True)
    found["grows"] = []
    for iteration, largest in enumerate((100, 2500, 20_000)):
        grows.choose(range(iteration, iteration + 1))
        saved = largest * executor.stage_index
        grows.loop.note(Measured(0, 0, saved, 0, 0, 0, 0), executor, iteration)
        assert grows.loop.tuner is not None
        found["grows"].append([one.k for one in grows.loop.tuner.candidates])
    found["grown"] = [line for line in grows.said if "save more" in line]

    try:
        first.loop.choose(executor, 5, 2 * SAMPLES)
    except ValueError as error:
        found["another batch"] = str(error)
    try:
        Run(executor).measure(limit=1000)
    except PlanError as error:
        found["no memory"] = str(error)
    return found


if __name__ == "__main__":
    report(STAGES, work)
