"""Eight gloo processes, two pipelines of four stages: a traced run. Argument: a folder, for T.json and rank 0's output.

A script of its own, forked after the imports.
"""

import os
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state

from evenpipe.megatron.cpu_mode import cpu_mode
from evenpipe.megatron_lm.start import trace_of
from evenpipe.runtime.connections import connect
from evenpipe.runtime.executor import Executor
from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.schedule import Size, build, links, loop

STAGES, MICRO_BATCHES, WORLD = 4, 6, 8
TRAINED = (11, 12, 14)


def work(rank: int, folder: Path) -> None:
    """One process: the iterations, of which Megatron has skipped one."""
    torch.set_num_threads(1)
    cpu_mode().apply()
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), WORLD), rank=rank, world_size=WORLD)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(pipeline)
    connections = connect(ranks, links(loop(STAGES), pairs=True), "gloo", torch.device("cpu"))
    module = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU())
    args = Namespace(rank=rank, curr_iteration=None)
    trace = trace_of(folder / "T.json", 12, args)
    executor = Executor(pipeline.rank(), connections, torch.device("cpu"), module.parameters(), trace)
    with open(folder / f"rank-{rank}", "w") as said, redirect_stdout(said):
        for number in TRAINED:
            args.curr_iteration = number - 1
            stage = ModuleStage(
                [module],
                Edges.alike(torch.empty(4, 16)),
                lambda micro_batch: torch.ones(4, 16),
                lambda micro_batch, output: output.sum(),
                0 if pipeline.rank() == STAGES - 1 else None,
            )
            executor.run(build("1f1b", Size(STAGES, MICRO_BATCHES), bpipe=True), stage)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    mp.start_processes(work, (Path(sys.argv[1]),), nprocs=WORLD, start_method="fork")
