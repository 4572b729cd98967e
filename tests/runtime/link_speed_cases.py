"""Three gloo processes, a pipeline of as many stages, that measure their links, one of which is made slow.

Argument: a folder (stage-<stage>.json out).
"""

import sys
import time
from pathlib import Path

import torch

from evenpipe.runtime.connections import connect
from evenpipe.runtime.timing import sending_gbps
from evenpipe.schedule import Link, links, loop

sys.path.insert(0, str(Path(__file__).parents[2]))
from ranks import report

from tests.slow_links import slowed

STAGES = 3
SLOW_GBPS = 0.01
CPU = torch.device("cpu")


def measured_by(stage: int, folder: Path) -> list[object]:
    connections = connect(range(STAGES), links(loop(STAGES), pairs=True), "gloo", CPU)
    evict, load = Link("evict", 0, 2), Link("load", 2, 0)
    measured, channels = connections, connections.channels
    if stage == 0:
        time.sleep(0.3)  # a partner that comes late does not make the link slow
        measured = slowed(connections, evict, SLOW_GBPS)
    started = time.perf_counter()
    gbps = sending_gbps(measured, stage, CPU)
    seconds = time.perf_counter() - started
    received = []
    if stage != 1:
        out, back = (evict, load) if stage == 0 else (load, evict)
        sent, received = channels[out].send([torch.tensor([stage + 7])]), [torch.tensor([0])]
        channels[back].receive(received).wait()
        sent.wait()
    return [gbps, seconds, [int(tensor) for tensor in received]]


if __name__ == "__main__":
    report(STAGES, measured_by)
