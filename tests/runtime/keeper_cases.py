"""Four gloo processes that carry out schedules with swaps, and write down what came of each.

Arguments: a folder (cases.json in, rank-<rank>.json out).
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from evenpipe.runtime.connections import connect
from evenpipe.runtime.executor import Executor
from evenpipe.runtime.host_memory import HostLink, Passage
from evenpipe.runtime.recompute_swap import PLAIN_CALLER, Keeper, Keeping, NodeCaller
from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.schedule import Schedule, Unit, swapped_at_once, verify

sys.path.insert(0, str(Path(__file__).parent))
from ranks import each_case, report

WORLD = 4
ROWS, WIDTH = 64, 32
HOST = torch.device("cpu")
aten = torch.ops.aten

#: GELU's result is computed again; tanh's is on the host, and back before the backward, or before that of its user.
NBYTES = ROWS * WIDTH * 4
KEEPING = Keeping(
    again={0},
    dropped={0},
    swapped={1},
    made={0: ((0, NBYTES),), 1: ((1, NBYTES),)},
    out={2: (1,)},
    gone={2: (1,)},
    back={2: (1,)},
)
EARLY = Keeping(swapped={1}, made={1: ((1, NBYTES),)}, out={2: (1,)}, early=(1,))
WAYS = {"all": Keeping(), "kept": KEEPING, "early": EARLY}


class SleepingHostLink(HostLink):
    """A link of so many 10^9 bytes/s each way: copies at once, and whoever waits for one sleeps until it would be."""

    def __init__(self, gbps: float) -> None:
        self._seconds_a_byte = 1e-9 / gbps
        self._free = {"out": 0.0, "back": 0.0}

    def out(self, memory: Tensor) -> Passage:
        return self._passage("out", memory.clone())

    def back(self, host: Tensor, memory: Tensor) -> Passage:
        return self._passage("back", memory.copy_(host))

    def _passage(self, way: str, target: Tensor) -> Passage:
        until = max(self._free[way], time.perf_counter()) + target.numel() * self._seconds_a_byte
        self._free[way] = until
        return Passage(target, lambda: time.sleep(max(0.0, until - time.perf_counter())))


class Block(torch.nn.Module):
    """What it saves: its input, GELU's argument and result, tanh's result."""

    def __init__(self, place: int, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(place)
        self.first, self.second = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.keep: NodeCaller = PLAIN_CALLER

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.keep(0, aten.gelu.default, self.first(value))
        hidden = self.keep(1, aten.tanh.default, self.second(hidden))
        return self.keep(2, aten.mul.Tensor, hidden, hidden)  # type: ignore[no-any-return]


class KeptStage(ModuleStage):
    keeping = Keeping()
    keeper: Keeper | None = None

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        if self.keeper is None:
            return super().forward(unit, inputs)
        block = self.chunks[unit.chunk]
        with self.keeper.forward(unit, self.keeping, lambda ordinal: contextlib.nullcontext()) as block.keep:
            outputs = super().forward(unit, inputs)
        block.keep = PLAIN_CALLER
        return outputs


def carry_out(case: dict, rank: int) -> dict:
    program = verify(Schedule.parse(case["schedule"]))
    schedule = program.schedule
    connections = connect(range(schedule.stages), program.links, "gloo", HOST)
    modules = [Block(schedule.places.position(rank, chunk)) for chunk in range(schedule.chunks)]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    executor = Executor(rank, connections, HOST, parameters)
    last = schedule.places.last
    loss_chunk = last.chunk if rank == last.stage else None
    given = torch.Generator().manual_seed(3)
    inputs = [torch.randn(ROWS, WIDTH, generator=given) for _ in range(schedule.micro_batches)]
    edges = Edges.alike(torch.empty(ROWS, WIDTH), schedule.chunks)
    link, reserved = None, 0
    stage = KeptStage(modules, edges, inputs.__getitem__, lambda i, out: out.square().mean(), loss_chunk)
    if case["way"] != "all":
        link = SleepingHostLink(case["gbps"]) if case["gbps"] else HostLink(HOST)
        executor.keeper = stage.keeper = Keeper(executor.store, HOST, link)
        stage.keeping = WAYS[case["way"]]
        if not case["gbps"]:
            at_once = sum(swapped_at_once(schedule.actions[rank]).values())
            link.memory.reserve(stage.keeping.sizes_on_host([]) * at_once)
            reserved = link.memory.nbytes
    executor.run(program, stage)
    executor.run(program, stage)
    executor.store.assert_empty()
    connections.close()
    return {
        "gradients": [one.grad.numpy().tobytes().hex() for one in parameters],
        "peak": executor.counter.peak_bytes,
        "host": [reserved, link.memory.nbytes if reserved else 0],
    }


if __name__ == "__main__":
    report(WORLD, lambda rank, folder: each_case(folder, lambda case: carry_out(case, rank)))
