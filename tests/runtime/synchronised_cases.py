"""Two gloo processes whose stages synchronise, as a device does, within every forward and backward.

Arguments: a folder (store in, rank-<rank>.json out). The program as it is first, then with receives that are posted
k + 1 compute actions ahead: until it hangs, which is seen after some seconds.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from executor_cases import ROWS, WIDTH, chunk_module, loss, sample
from torch import Tensor

from evenpipe.runtime.channel import Channel, Transfer
from evenpipe.runtime.connections import connect
from evenpipe.runtime.executor import Executor
from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.schedule import COMPUTE, Program, Size, Step, build

STAGES, MICRO_BATCHES = 2, 4
HANGS_AFTER = timedelta(seconds=8)


class PostedAhead(Program):
    """The same with each receive k + 1 compute actions ahead of its use, whatever the other stage does."""

    @cached_property
    def steps(self) -> Sequence[tuple[Step, ...]]:
        return [self._posted_ahead(steps) for steps in Program(self.schedule, self.pairs).steps]

    def _posted_ahead(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        compute = [at for at, step in enumerate(steps) if step.action.kind in COMPUTE]
        posts, ahead = defaultdict(list), self.schedule.group_size + 1
        for number, at in enumerate(compute):
            if steps[at].takes is not None:
                posts[compute[number - ahead] + 1 if number >= ahead else 0].append(steps[at].takes)
        return tuple(step._replace(post=tuple(posts[at]), then_post=()) for at, step in enumerate(steps))


class Watched:
    """`channel`, whose transfers are known to `under_way`."""

    def __init__(self, channel: Channel, under_way: list[Transfer]) -> None:
        self._channel, self._under_way = channel, under_way

    def send(self, tensors: Sequence[Tensor]) -> Transfer:
        self._under_way.append(self._channel.send(tensors))
        return self._under_way[-1]

    def receive(self, buffers: Sequence[Tensor], after: Sequence[Transfer] = ()) -> Transfer:
        self._under_way.append(self._channel.receive(buffers, after))
        return self._under_way[-1]

    def give_up(self) -> None:
        self._channel.give_up()

    def close(self) -> None:
        self._channel.close()


class SynchronisingStage(ModuleStage):
    """Before it computes, it waits for all that is under way, both ends' of what has been posted."""

    under_way: list[Transfer]

    def synchronise(self) -> None:
        for transfer in self.under_way:
            for work in transfer._works:
                work.wait(HANGS_AFTER)
            transfer._works = ()  # gloo's must not be waited for again
        self.under_way.clear()

    def forward(self, unit, inputs):  # type: ignore[no-untyped-def]
        self.synchronise()
        return super().forward(unit, inputs)

    def backward(self, unit, gradients):  # type: ignore[no-untyped-def]
        self.synchronise()
        return super().backward(unit, gradients)


def carried_out(rank: int, program: Program) -> list[str] | str:
    """The losses; or what the wait that came to no end raised."""
    connections = connect(range(STAGES), program.links, "gloo", torch.device("cpu"))
    under_way: list[Transfer] = []
    watched = replace(connections, channels={k: Watched(c, under_way) for k, c in connections.channels.items()})
    is_last = 0 if rank == STAGES - 1 else None
    edges = Edges.alike(torch.empty(ROWS, WIDTH))
    stage = SynchronisingStage([chunk_module(rank)], edges, sample, loss, is_last)
    stage.under_way = under_way
    try:
        Executor(rank, watched, torch.device("cpu")).run(program, stage)
    except RuntimeError as error:
        return str(error)
    return [stage.losses[i].item().hex() for i in sorted(stage.losses)]


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), STAGES), rank=rank, world_size=STAGES)
    program = build("1f1b", Size(STAGES, MICRO_BATCHES))
    found = [carried_out(rank, each) for each in (program, PostedAhead(program.schedule, program.pairs))]
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # what is under way never ends


if __name__ == "__main__":
    mp.start_processes(work, (Path(sys.argv[1]),), nprocs=STAGES, start_method="fork")
