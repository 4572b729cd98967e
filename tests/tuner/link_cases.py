"""Three gloo processes, a pipeline of as many stages, that measure their links, one of which is slow.

Argument: a folder (rank-<rank>.json out). A script of its own, forked after the imports: they cost seconds each.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from evenpipe.runtime.channel import Channel, Transfer
from evenpipe.runtime.connections import connect
from evenpipe.schedule import Link, links, loop
from evenpipe.tuner.links import Burst, Ends, measure_links

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.runtime.ranks import report

STAGES = 3
BURSTS = (Burst(1, 4000), Burst(3, 1000))
CPU = torch.device("cpu")


class Slow(Channel):
    """Takes 10 µs for every byte: a message of 1000 bytes 10 ms."""

    def send(self, tensors: Sequence[Tensor]) -> Transfer:
        time.sleep(sum(tensor.nbytes for tensor in tensors) * 1e-5)
        return super().send(tensors)


def work(stage: int, folder: Path) -> list[dict]:
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
    return [measured, follows]


if __name__ == "__main__":
    report(STAGES, work)
