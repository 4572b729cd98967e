"""Three gloo processes, a pipeline of as many stages, that measure their links, one of which is made slow.

Argument: a folder (stage-<stage>.json out). A script of its own, forked after the imports: they cost seconds each.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from evenpipe.runtime.channel import Channel, Transfer
from evenpipe.runtime.connections import connect
from evenpipe.runtime.link_speed import sending_gbps
from evenpipe.schedule import Link, links, loop

STAGES = 3
SLOW_GBPS = 0.01
CPU = torch.device("cpu")


class Slow(Channel):
    """Takes its time for every byte."""

    def send(self, tensors: Sequence[Tensor]) -> Transfer:
        time.sleep(sum(tensor.nbytes for tensor in tensors) / (SLOW_GBPS * 1e9))
        return super().send(tensors)


def main(stage: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=stage, world_size=STAGES)
    connections = connect(range(STAGES), links(loop(STAGES), pairs=True), "gloo", CPU)
    evict, load = Link("evict", 0, 2), Link("load", 2, 0)
    channels = dict(connections.channels)
    if stage == 0:
        time.sleep(0.3)  # a partner that comes late does not make the link slow
        channels[evict] = Slow(0, 2, channels[evict]._group, CPU)
    started = time.perf_counter()
    gbps = sending_gbps(replace(connections, channels=channels), stage, CPU)
    seconds = time.perf_counter() - started
    received = []
    if stage != 1:
        out, back = (evict, load) if stage == 0 else (load, evict)
        sent, received = channels[out].send([torch.tensor([stage + 7])]), [torch.tensor([0])]
        channels[back].receive(received).wait()
        sent.wait()
    (folder / f"stage-{stage}.json").write_text(json.dumps([gbps, seconds, [int(tensor) for tensor in received]]))
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    mp.start_processes(main, args=(Path(sys.argv[1]),), nprocs=STAGES, start_method="fork")
