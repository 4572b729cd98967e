"""In each of four processes: training under caps of memory, beside training without one.

Argument: a folder (rank-<rank>.json out). A script of its own, forked after the imports.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.schedule import ScheduleError, Size, build
from evenpipe.simulate.under_cap import Way
from evenpipe.torch import capped
from evenpipe.torch.capped import SwapTuning
from evenpipe.torch.pipeline import ModulePipeline

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.runtime.ranks import report

STAGES, MICRO_BATCHES, ROWS, WIDTH = 4, 8, 64, 32
#: By schedule: model chunks, caps that swaps can keep, and one that they cannot, as parts of the worst stage's peak.
#: The last stage of ZB-H1 has all of its micro-batches whole at once.
SCHEDULES = {"1f1b": (1, (0.9, 0.45), 0.01), "interleaved": (2, (0.6,), 0.01), "zb-h1": (1, (), 0.9)}
#: A model of blocks whose copies to the host count as slow.
SLOW_HOST = "blocks"
#: The same without layers that can be recomputed, whose stages may send to their partners.
PARTNERS = "partners"
#: Whose plan at a cap another run goes on by.
RESUMED = "1f1b"
_GIB, _ENOUGH_GIB, _MIB = 2**30, 1.0, 2**20


def part(position: int) -> nn.Module:
    torch.manual_seed(position)
    blocks = (nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(*(one for _ in range(6) for one in blocks[:3]), blocks[3])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, given: Tensor) -> Tensor:
        return given + nn.functional.dropout(self.down(nn.functional.gelu(self.up(given))), 0.1)


def blocks(position: int) -> nn.Module:
    torch.manual_seed(position)
    return nn.Sequential(*(Block() for _ in range(4)))


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randn(MICRO_BATCHES * ROWS, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


def train(
    schedule: str,
    gib: float | None,
    said: list[str],
    state: dict[str, Any] | None = None,
    last: tuple[Way, ...] | None = None,
) -> dict[str, Any]:
    """Three batches, by the plan of a `state` if it is given: losses and weights, and what each held and swapped.

    last: by stage, the way of the third batch.
    """
    slow, sends = schedule in (SLOW_HOST, PARTNERS), schedule == PARTNERS
    name, chunks = ("1f1b", 1) if slow else (schedule, SCHEDULES[schedule][0])
    program = build(name, Size(STAGES, MICRO_BATCHES, chunks), bpipe=sends and gib is not None)
    pipeline = ModulePipeline(
        blocks if slow else part, program, nn.functional.mse_loss, torch.empty(ROWS, WIDTH), measure=True
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    capped.print_once = said.append  # what rank 0 prints
    tuning = None if gib is None else SwapTuning(pipeline, optimizer, memory_gib=gib, state=state)
    if tuning is not None and sends:
        tuning._able = [[]]
    if pipeline.executor.swaps is not None:
        pipeline.executor.swaps.link.ms_a_byte = lambda: float(slow)  # type: ignore[method-assign]
    torch.manual_seed(0)
    remarks: list[str] = []
    pipeline.executor.observer.remark = remarks.append  # type: ignore[method-assign]
    losses, counted, counter, for_guests = [], [], pipeline.executor.counter, []
    for number in range(3):
        if number == 2 and last is not None and tuning is not None:
            tuning.loop._found[tuning._size] = last
        counter.reset_peak()
        loss = (pipeline if tuning is None else tuning).step(*batch(number))
        losses.append("" if loss is None else loss.item().hex())
        optimizer.step()
        optimizer.zero_grad()
        counted.append((counter.peak_bytes, counter.swapped_bytes))
        for_guests.append(pipeline.executor.pool.allocated_bytes)
    evicted = counter.evicted_bytes
    pinned = 0 if pipeline.executor.swaps is None else pipeline.executor.swaps.link.memory.nbytes
    weights = [one.detach().sum().item().hex() for one in pipeline.parameters()]
    pipeline.close()
    kept = None if tuning is None else json.loads(json.dumps(tuning.state_dict()))
    found = {"losses": losses, "weights": weights, "counted": counted, "pinned": pinned}
    return {**found, "state": kept, "evicted": evicted, "for guests": for_guests, "remarks": remarks}


def run(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for schedule, (_, within, beyond) in SCHEDULES.items():
        said: list[str] = []
        whole = train(schedule, None, said)
        enough = train(schedule, _ENOUGH_GIB, said)
        [rooms] = re.findall(r"nothing is swapped, for all fits; .* MiB by stage: ([\d. ]+)", said.pop())
        used = _ENOUGH_GIB * _GIB - min(map(float, rooms.split())) * _MIB
        peak = torch.tensor(whole["counted"][-1][0], dtype=torch.float64)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        caps = {str(cap): train(schedule, (used + cap * peak.item()) / _GIB, said) for cap in within}
        try:
            train(schedule, (used + beyond * peak.item()) / _GIB, said)
            refused = ""
        except ScheduleError as error:
            refused = str(error)
        found[schedule] = {"": whole, "enough": enough, **caps, "refused": refused, "peak": peak.item()}
        if schedule == RESUMED:
            lines = found["resumed said"] = []
            of_rank_0 = None if rank else caps["0.9"]["state"]
            found["resumed"] = train(schedule, (used + 0.9 * peak.item()) / _GIB, lines, of_rank_0)
            found["changed"] = train(schedule, (used + 0.45 * peak.item()) / _GIB, lines, caps["0.9"]["state"])
    for name, cap in ((SLOW_HOST, 0.45), (PARTNERS, 0.85)):
        said = []
        whole, enough = train(name, None, said), train(name, _ENOUGH_GIB, said)
        used = _ENOUGH_GIB * _GIB - min(map(float, said.pop().split(": ")[-1].split())) * _MIB
        peak = torch.tensor(whole["counted"][-1][0], dtype=torch.float64)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        gib = (used + cap * peak.item()) / _GIB
        capped = train(name, gib, said)
        if name == PARTNERS:
            # The same plan under a cap that its micro-batches do not keep to.
            lower = (used + 0.7 * peak.item()) / _GIB
            found["grown"] = train(name, lower, [], {**(capped["state"] or {}), "limit_bytes": int(lower * _GIB)})
            found["another plan"] = train(name, gib, [], capped["state"], (Way("none", 0.0, 0),) * STAGES)
        found[name] = {"": whole, "enough": enough, str(cap): capped, "peak": peak.item(), "said": said}
    return found


if __name__ == "__main__":
    report(STAGES, run)
