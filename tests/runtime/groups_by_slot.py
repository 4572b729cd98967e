"""Eight gloo processes that join as their slots, case by case, and write down the groups that Megatron makes of them.

Argument: a folder (cases.json in, slot-<slot>.json out). A group is recorded as the slots that answer through it, in
the group's order. A script of its own, forked after the imports: they cost seconds each.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state

from evenpipe.runtime.placement import place

WORLD = 8


def slots_in(group: dist.ProcessGroup, slot: int) -> list[int]:
    slots = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(slots, torch.tensor([slot]), group=group)
    return [int(s) for s in slots]


def join(case: dict[str, Any], number: int, slot: int, folder: Path) -> dict[str, Any]:
    per_node = case["gpus_per_node"]
    environ = {
        "RANK": str(slot),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_RANK": str(slot % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
    }
    if case["placed"]:
        place(case["p"], case["t"], case["d"], per_node).apply(environ)
    store = f"file://{folder}/store-{number}"
    dist.init_process_group("gloo", init_method=store, rank=int(environ["RANK"]), world_size=WORLD)
    parallel_state.initialize_model_parallel(case["t"], case["p"])
    seen = {
        "rank": dist.get_rank(),
        "local_rank": int(environ["LOCAL_RANK"]),
        "pipeline": slots_in(parallel_state.get_pipeline_model_parallel_group(), slot),
        "tensor": slots_in(parallel_state.get_tensor_model_parallel_group(), slot),
        "data": slots_in(parallel_state.get_data_parallel_group(), slot),
    }
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return seen


def main(slot: int, folder: Path) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    seen = [join(case, number, slot, folder) for number, case in enumerate(cases)]
    (folder / f"slot-{slot}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    mp.start_processes(main, args=(Path(sys.argv[1]),), nprocs=WORLD, start_method="fork")
