"""What `scale.py` measures: schedules, plans, partitions and traces of growing size."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import nn

from evenpipe.descriptions import cluster, model
from evenpipe.partition.counting import count
from evenpipe.partition.dawnpiper.capuchin import Optimize
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.profile import Node, Origin, Parameter, Profile, Storage
from evenpipe.partition.search.finding import find_plan
from evenpipe.partition.trace import trace, weightless
from evenpipe.planner.search.question import Engine, Question
from evenpipe.planner.search.search import search
from evenpipe.schedule import NEEDS, LinkKind, Size, build, verify
from evenpipe.simulate import Costs, Wire, simulate

__all__ = ["Case", "Step", "partitions", "plans", "schedules", "traces"]

#: Micro-batches where stages grow.
STEADY: Final = 2048
OTHERS: Final[tuple[tuple[str, dict[str, int]], ...]] = (
    ("1f1b", {}),
    ("gpipe", {}),
    ("kfkb", {"group_size": 4}),
    ("interleaved", {"chunks": 2}),
    ("2bw", {"batches": 3}),
    ("zb-h1", {}),
    ("v-half", {"chunks": 2}),
)
#: Below, nothing is evicted.
LEAST_STAGES: Final = 4
#: Below, nothing fits.
LEAST_GPUS: Final = 160
ALL: Final = Engine("everything", frozenset(NEEDS), context=False)


class Step(NamedTuple):
    """What has been done since the step before: its name, or "" where its time does not count; the size, if known."""

    name: str
    size: int = 0


class Case(NamedTuple):
    """One size of what grows: `steps` does it, and says after each part what that was."""

    of: str
    at: str
    unit: str
    steps: Callable[[], Iterator[Step]]


def halved(most: int, times: int) -> list[int]:
    """`most`, and so many halves of halves, in ascending order."""
    return [max(1, most >> n) for n in reversed(range(times))]


def schedules(most_micro_batches: int, most_stages: int) -> Iterator[Case]:
    """1F1B with BPipe both ways, and the others by micro-batches."""
    for m in halved(most_micro_batches, 5):
        yield schedule_case("1f1b + BPipe by m", f"p=8, m={m:,}", "1f1b", Size(8, m), True)
    for p in (size for size in halved(most_stages, 5) if size >= LEAST_STAGES):
        m = min(STEADY, most_micro_batches)
        yield schedule_case("1f1b + BPipe by p", f"p={p}, m={m:,}", "1f1b", Size(p, m), True)
    for name, sizes in OTHERS:
        for m in halved(max(128, most_micro_batches // 4), 4):
            yield schedule_case(f"{name} by m", f"p=16, m={m:,}", name, Size(16, m, **sizes), False)


def schedule_case(of: str, at: str, name: str, size: Size, bpipe: bool) -> Case:
    return Case(of, at, "action", partial(schedule_steps, name, size, bpipe))


def schedule_steps(name: str, size: Size, bpipe: bool) -> Iterator[Step]:
    """Build, verify by itself, simulate."""
    program = build(name, size, bpipe=bpipe)
    yield Step("build")
    actions = sum(map(len, program.schedule.actions))
    schedule = replace(program.schedule)  # without what has been derived of it
    yield Step("", actions)
    verify(schedule, pairs=bpipe)
    yield Step("verify")
    near, far = Wire(transmit_ms=1.0), Wire(transmit_ms=20.0)
    wires: dict[LinkKind, Wire] = {"forward": near, "backward": near, "evict": far, "load": far}
    simulate(program, Costs((36.0,) * size.stages, (74.0,) * size.stages, wires))
    yield Step("simulate")


def plans(most_gpus: int) -> Iterator[Case]:
    """GPT-3 175B with as many samples as GPUs, by Megatron-LM's flushed schedules."""
    for gpus in (size for size in halved(most_gpus, 7)[::2] if size >= LEAST_GPUS):
        yield Case("GPT-3 175B", f"{gpus:,} GPUs", "GPU", partial(plan_steps, gpus))


def plan_steps(gpus: int) -> Iterator[Step]:
    where = cluster(f"{gpus // 8}x8-a100-80gb")
    search(Question(model("gpt3-175b"), where, gpus, ALL, ("1f1b", "interleaved", "gpipe")))
    yield Step("plan", gpus)


def partitions(most_nodes: int) -> Iterator[Case]:
    """A chain with residuals, in as much memory as it takes, and in two fifths of what it saves."""
    for optimize in ("none", "swap+recompute"):
        for nodes in halved(most_nodes, 6):
            yield Case(f"optimised: {optimize}", f"{nodes:,} nodes", "node", partial(partition_steps, nodes, optimize))


def partition_steps(nodes: int, optimize: Optimize) -> Iterator[Step]:
    profile = chain(nodes)
    saved = sum(storage.nbytes for storage in profile.storages)
    yield Step("", nodes)
    limit_bytes = 100 * saved if optimize == "none" else saved * 2 // 5
    find_plan(profile, Workload("1f1b", 16), 8, limit_bytes, optimize, 16.0)
    yield Step("partition")


def chain(length: int, block: int = 20) -> Profile:
    """Nodes of random times and bytes; the first of every `block` is read again by the first of the next."""
    chance = random.Random(0)
    nodes, storages, parameters = list[Node](), list[Storage](), list[Parameter]()
    for number in range(length):
        nbytes, ms, weighs = chance.choice((1, 2, 4)) << 20, chance.uniform(0.01, 0.03), number % 4 == 0
        users = [user for user in sorted({number + 1, number + block}) if user < length]
        read = tuple(users if number % block == 0 else users[:1])
        storages.append(Storage(nbytes=nbytes, producer=number, users=read, savers=read[:1]))
        if weighs:
            weight = Parameter(
                name=f"w{number}", nbytes=1 << 16, gradient_bytes=1 << 16, optimizer_bytes=1 << 17, users=(number,)
            )
            parameters.append(weight)
        nodes.append(
            Node(
                name=f"n{number}",
                forward_ms=ms,
                backward_ms=2 * ms,
                activation_bytes=nbytes,
                parameter_bytes=weighs << 16,
                gradient_bytes=weighs << 16,
                optimizer_bytes=weighs << 17,
                released_bytes=0,
                output_bytes=nbytes,
                cut_allowed=number < length - 1,
                cut_bytes=nbytes,
            )
        )
    origin = Origin(
        model="chain", micro_batch_size=1, device="none", precision="fp32", source="chance", digest="", versions={}
    )
    return Profile(origin=origin, nodes=tuple(nodes), storages=tuple(storages), parameters=tuple(parameters))


class Chain(nn.Module):
    """Residual blocks of four operations."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x)) * 0.5
        return x.sum()


def traces(most_nodes: int) -> Iterator[Case]:
    """A plain module."""
    for nodes in halved(most_nodes, 4):
        yield Case("plain module", f"{nodes:,} nodes", "node", partial(trace_steps, nodes))


def trace_steps(nodes: int) -> Iterator[Step]:
    with weightless():
        chained, x = Chain(max(1, nodes // 4)), torch.zeros(2, 16)
    yield Step("")
    graph = trace(chained, {"x": x})
    yield Step("trace", len(graph.nodes))
    count(graph, "cuda", silent)
    yield Step("count")


def silent(done: int, total: int) -> None:
    """No progress is shown within a case."""
