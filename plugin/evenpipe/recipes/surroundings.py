"""Defaults for a line of Megatron-LM: its cluster and allocator; and its flags in place of the planner's."""

from __future__ import annotations

import math
import os
import re
from argparse import SUPPRESS, ArgumentError, ArgumentParser
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

__all__ = ["expandable", "in_megatron", "megatron_flags", "smallest_cluster"]

#: Flags of `evenpipe estimate` as Megatron spells them.
_MEGATRON: Final = {
    "--recompute full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute selective": "--recompute-granularity selective",
    "--attention flash": "--attention-backend flash",
    "--stages": "--pipeline-model-parallel-size",
    "--tensor-parallel": "--tensor-model-parallel-size",
    "--context-parallel": "--context-parallel-size",
    "--expert-parallel": "--expert-model-parallel-size",
    "--chunks": "--num-virtual-stages-per-pipeline-rank",
    "--layout": "--pipeline-model-parallel-layout",
    "--sharded-optimizer": "--use-distributed-optimizer",
    "--schedule": "--evenpipe-schedule",
}
_FLAG: Final = re.compile("|".join(rf"{re.escape(ours)}(?![\w-])" for ours in _MEGATRON))
_SIZES: Final = ("tensor-model-parallel-size", "context-parallel-size", "pipeline-model-parallel-size")


@cache
def megatron_flags() -> Mapping[str, Any]:
    """Return ``megatron_flags.yaml``, which says what is in it."""
    found: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("megatron_flags.yaml").read_text("utf-8"))
    return found


def expandable(setting: str = "") -> bool:
    """Return whether a line's own `setting`, else this shell's, turns the allocator's expandable segments on."""
    variables = [os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
    return any("expandable_segments:true" in one.lower() for one in ([setting] if setting else variables))


def in_megatron(line: str) -> str:
    """Return `line` with flags of `evenpipe estimate` as Megatron spells them."""
    return _FLAG.sub(lambda match: _MEGATRON[match[0]], line)


def smallest_cluster(name: str, gpus_per_node: int, flags: Sequence[str]) -> str:
    """Return the name of the smallest cluster of such nodes that holds one replica."""
    least = _least_gpus(flags)
    if least < gpus_per_node:
        return f"1x{least}-{name}"
    return f"{math.lcm(least, gpus_per_node) // gpus_per_node}x{gpus_per_node}-{name}"


def _least_gpus(flags: Sequence[str]) -> int:
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=SUPPRESS)
    for size in _SIZES:
        parser.add_argument(f"--{size}")
    try:
        found, _ = parser.parse_known_args([word for flag in flags for word in flag.split("=", 1)])
    except ArgumentError:  # the script's own parser says what is wrong
        return 1
    given = [int(value) for value in vars(found).values() if str(value).isdecimal()]
    return max(1, math.prod(given))
