"""Three gloo processes, a pipeline of as many stages, that measure their links, one of which is slow.

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
from evenpipe.schedule import Link, links, loop
from evenpipe.tuner.links import Burst, Ends, measure_links

STAGES = 3
BURSTS = (Burst(1, 4000), Burst(3, 1000))
CPU = torch.device("cpu")


class Slow(Channel):
    """Takes 10 µs for every byte: a message of 1000 bytes 10 ms."""

    def send(self, tensors: Sequence[Tensor]) -> Transfer:
        time.sleep(sum(tensor.nbytes for tensor in tensors) * 1e-5)
        return super().send(tensors)


def main(stage: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=stage, world_size=STAGES)
    connections = connect(range(STAGES), links(loop(STAGES)), "gloo", CPU)
    channels = dict(connections.channels)
    slow = Link("backward", 1, 0)
    if stage == 1:
        time.sleep(0.3)  # a stage that comes late does not make its links slow
        channels[slow] = Slow(1, 0, channels[slow]._group, CPU)
    ends = replace(connections, channels=channels)
    once, again = (measure_links(Ends(ends, stage, STAGES, CPU), BURSTS) for _ in range(2))
    # What follows arrives as it was sent.
    follows = {}
    for link, channel in channels.items():
        number = torch.tensor([float(stage)])
        transfer = channel.send([number]) if link.source == stage else channel.receive([number])
        transfer.wait()
        follows[f"{link.kind} {link.source}"] = number.item()
    measured = {f"{link.kind} {link.source}": list(zip(once[link], again[link], strict=True)) for link in once}
    (folder / f"stage-{stage}.json").write_text(json.dumps([measured, follows]))
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    mp.start_processes(main, args=(Path(sys.argv[1]),), nprocs=STAGES, start_method="fork")
