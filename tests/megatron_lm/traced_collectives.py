"""Runs the script TRACED, and writes to TRACES.<rank> which collectives among several ranks each iteration made.

A JSON list of [iteration from 0, function, ranks in the group, whether it waited, where in the code].
"""

import atexit
import functools
import json
import os
import runpy
import sys

import torch.distributed as dist

COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter_tensor"),
    *("broadcast", "broadcast_object_list", "barrier", "gather", "reduce", "scatter", "all_to_all_single"),
)
made: list[tuple[int, str, int, bool, str]] = []


def traced(name):
    original = getattr(dist, name)

    @functools.wraps(original)
    def collective(*args, **kwargs):
        groups = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
        ranks = dist.get_world_size(groups[0] if groups else None)
        if ranks > 1:
            made.append((iteration(), name, ranks, not kwargs.get("async_op", False), caller()))
        return original(*args, **kwargs)

    return collective


def iteration() -> int:
    """The one that Megatron's loop is at; -1 before the first."""
    training = sys.modules.get("megatron.training.global_vars")
    return getattr(getattr(training, "_GLOBAL_ARGS", None), "curr_iteration", -1)


def caller() -> str:
    frame = sys._getframe(2)
    while frame and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_code.co_name}" if frame else "?"


def write() -> None:
    with open(f"{os.environ['TRACES']}.{os.environ['RANK']}", "w") as file:
        json.dump(made, file)


if __name__ == "__main__":
    for collective in COLLECTIVES:
        setattr(dist, collective, traced(collective))
    atexit.register(write)
    runpy.run_path(os.environ["TRACED"], run_name="__main__")
