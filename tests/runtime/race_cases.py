"""Four gloo processes that carry out the runtime's cases under the checker of races, and some with mutants of the code.

Argument: a folder (cases.json in, rank-<rank>.json out).
"""

from __future__ import annotations

import importlib
import io
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[2]))

import channel_cases
import executor_cases
import keeper_cases
import stream_cases
import torch
import torch.distributed as dist
from ranks import each_case, report
from stream_cases import SteppedModule
from torch import Tensor

from evenpipe.runtime import streams
from evenpipe.runtime.connections import connect, open_channels
from evenpipe.runtime.exchange import Exchange
from evenpipe.runtime.host_memory import HostLink
from evenpipe.runtime.memory import MemoryCounter
from evenpipe.runtime.recompute_swap import PLAIN_CALLER, SwappedStorage
from evenpipe.runtime.saved import Geometry
from evenpipe.schedule import Unit, links, loop
from tests.rig.checked import checking
from tests.rig.clocks import Device
from tests.rig.mutants import mutated
from tests.rig.races import Memory

WORLD = 4
HOST = torch.device("cpu")
LIMIT = timedelta(seconds=60)


class Swapping(SteppedModule):
    """A stage of 2BW that swaps."""

    def part(self, place: int) -> torch.nn.Module:
        return keeper_cases.Block(place, executor_cases.WIDTH)

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        assert self.keeper is not None
        keeping = replace(keeper_cases.EARLY, made={1: ((1, executor_cases.ROWS * executor_cases.WIDTH * 4),)})
        with self.keeper.forward(unit, keeping, lambda ordinal: nullcontext()) as self.module.keep:
            outputs = super().forward(unit, inputs)
        self.module.keep = PLAIN_CALLER
        return outputs


def of_executor(case: dict[str, Any], rank: int) -> Any:
    found = executor_cases.carry_out(
        {"slow": [], "ms": 0.0, "measure": [True], "rows": [8], "fused": False, **case}, rank
    )
    return [{key: batch[key] for key in ("losses", "gradients", "remarks")} for batch in found["batches"]]


def of_keeper(case: dict[str, Any], rank: int) -> Any:
    return keeper_cases.carry_out({"gbps": 0, **case}, rank)["gradients"]


def of_stream(case: dict[str, Any], rank: int) -> Any:
    swaps = case.get("swaps", False)
    found = stream_cases.train(rank, stream_cases.CASES[case["name"]], Swapping if swaps else SteppedModule, swaps)
    return {key: found[key] for key in ("losses", "weights")}


def of_channels(case: dict[str, Any], rank: int) -> Any:
    for one in channel_cases.CASES:
        if one.__name__ not in case["without"]:
            one(rank)


def of_exchange(case: dict[str, Any], rank: int) -> Any:
    """The rows are summed beside compute, and memory of the compute stream is wanted soon after."""
    exchange = Exchange(dist.group.WORLD, 2, HOST)  # type: ignore[arg-type]
    rows = []
    for turn in range(3):
        exchange.start([float(rank), 10.0 * turn])
        torch.ones(2, dtype=torch.float64)
        rows.append(exchange.finish())
        torch.ones(2, dtype=torch.float64)
    return rows


def of_following(case: dict[str, Any], rank: int) -> Any:
    """A load into memory that an eviction leaves is held up by it alone; compute goes on, and has read it before."""
    down, up = ("evict", 0, 1), ("load", 1, 0)
    if rank > 1:
        return None
    channels = open_channels([down, up], "gloo", HOST)
    if rank == 0:
        memory, other = torch.ones(1000) * 3, torch.ones(500) * 2
        sending = channels[down].send([memory, other])
        del other  # its memory is free when the current stream has waited, not when a load is through
        memory.sum()
        following = channels[up].receive([memory], after=[sending])
        torch.ones(500)
        following.wait()
        memory.sum()
        sending.wait()
        torch.ones(500)
    else:
        inbox = [torch.empty(1000), torch.empty(500)]
        channels[down].receive(inbox).wait()
        channels[up].send([inbox[0] * 2]).wait()
    for channel in channels.values():
        channel.close()
    return None


def of_swap(case: dict[str, Any], rank: int) -> Any:
    """Storages leave for the host beside compute and come back; one stays, one dies as it leaves, one as it arrives."""
    if rank:
        return None
    link, owners, counter = HostLink(HOST), dict[int, Any](), MemoryCounter()
    found = []
    for way in ("there and back", "stays", "there and back", "dies leaving", "dies arriving"):
        value = torch.randn(64, 64)
        product, geometry = value * 2, Geometry.of(value)
        saved = SwappedStorage(value, link, 0, owners, counter)
        saved.leave()
        product = product @ product
        if way in ("there and back", "dies arriving"):
            saved.gone()
        del value
        torch.randn(64, 64)
        if way != "dies leaving":
            saved.recall()
        torch.randn(64, 64)
        if not way.startswith("dies"):
            result = geometry.over(saved.fetched()) * product
            found.append(result.isfinite().all().item())
        saved.drop()
        torch.randn(64, 64)
    assert all(found)
    return found


def of_blocks(case: dict[str, Any], rank: int) -> Any:
    """What leaves gets a block of pinned memory that is still read by what comes back."""
    if rank:
        return None
    link, memory = HostLink(HOST), torch.empty(4096, dtype=torch.uint8)
    for turn in range(3):
        leaving = link.out(torch.full((4096,), turn, dtype=torch.uint8))
        leaving.wait()
        coming = link.back(leaving.target, memory)
        del leaving
        other = torch.zeros(4096, dtype=torch.uint8)
        following = link.out(other)
        coming.wait()
        assert memory.sum().item() == 4096 * turn
        following.wait()
        del following
    assert link.memory.nbytes == 4096
    return None


def of_back(case: dict[str, Any], rank: int) -> Any:
    """Storages are copied back before anybody has waited for the copy out."""
    if rank:
        return None
    link, memory = HostLink(HOST), torch.ones(4096, dtype=torch.uint8)
    leaving = link.out(memory)
    coming = link.back(leaving.target, torch.empty(4096, dtype=torch.uint8))
    coming.wait()
    leaving.wait()
    assert coming.target.sum().item() == 4096
    return None


def of_shared(case: dict[str, Any], rank: int) -> Any:
    """The runtime opens 36 streams: 34 for swaps, one that waits for loads, one for figures. Torch deals 32."""
    said = io.StringIO()
    with redirect_stderr(said):
        connections = connect(range(WORLD), links(loop(WORLD), True), "gloo", HOST)
        connections.compare(HostLink(HOST).named)
        before = said.getvalue()
        for turn in range(16):
            connections.compare({f"{name}, {turn}": stream for name, stream in HostLink(HOST).named.items()})
        connections.compare(Exchange(dist.group.WORLD, 1, HOST).named)  # type: ignore[arg-type]
    connections.close()
    return before, said.getvalue()


KINDS: dict[str, Callable[[dict[str, Any], int], Any]] = {
    "executor": of_executor,
    "keeper": of_keeper,
    "stream": of_stream,
    "channels": of_channels,
    "exchange": of_exchange,
    "swap": of_swap,
    "blocks": of_blocks,
    "back": of_back,
    "following": of_following,
    "shared": of_shared,
}


def carry_out(case: dict[str, Any], rank: int) -> dict[str, Any]:
    memory = Memory(Device())
    kind, mutant = case.pop("kind"), case.pop("mutant", None)
    change = nullcontext() if mutant is None else mutated(importlib.import_module(mutant[0]), *mutant[1:])
    result: dict[str, Any] = {}
    with change, checking(memory):
        try:
            result["found"] = KINDS[kind](case, rank)
        except Exception:
            result["error"] = traceback.format_exc()
    return {"races": list(memory.races), **result}


def outcomes(rank: int, folder: Path) -> dict[str, Any]:
    found = each_case(folder, lambda case: carry_out(case, rank))
    assert not streams.is_asynchronous(HOST)
    return found


if __name__ == "__main__":
    report(WORLD, outcomes, LIMIT)
