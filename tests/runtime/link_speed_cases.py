"""Three gloo processes, a pipeline of as many stages, that measure their links, one of which is made slow.

Argument: a folder (stage-<stage>.json out). A script of its own, forked after the imports: they cost seconds each.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from evenpipe.runtime.connections import connect
from evenpipe.runtime.timing import sending_gbps
from evenpipe.schedule import Link, links, loop

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.slow_links import slowed

STAGES = 3
SLOW_GBPS = 0.01
CPU = torch.device("cpu")


def main(stage: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=stage, world_size=STAGES)
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
    (folder / f"stage-{stage}.json").write_text(json.dumps([gbps, seconds, [int(tensor) for tensor in received]]))
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    mp.start_processes(main, args=(Path(sys.argv[1]),), nprocs=STAGES, start_method="fork")
