"""Gloo processes of a script of its own, forked after its imports, which cost seconds each.

The script's argument is a folder. Each process writes down there what came of it, in rank-<rank>.json.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["each_case", "report"]


def report(world: int, of_rank: Callable[[int, Path], Any], limit: timedelta | None = None) -> None:
    """Write down what `of_rank` returns for each rank, and the folder; ranks wait for each other up to `limit`."""
    mp.start_processes(_work, (Path(sys.argv[1]), world, of_rank, limit), nprocs=world, start_method="fork")


def _work(rank: int, folder: Path, world: int, of_rank: Callable[[int, Path], Any], limit: timedelta | None) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    (folder / f"rank-{rank}.json").write_text(json.dumps(of_rank(rank, folder)))
    dist.barrier()
    dist.destroy_process_group()


def each_case(folder: Path, carry_out: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Return by name what comes of each case of the folder's cases.json; all ranks go on to the next together."""
    results = {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        try:
            results[name] = carry_out(case)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        dist.barrier()
    return results
