"""``evenpipe recipe --from-flags``: the line that starts a run today, with EvenPipe in it, and what that changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evenpipe.cli.parser import UsageError
from evenpipe.cli.run_estimate import in_megatron, least_gpus
from evenpipe.planner.arguments import FlagError
from evenpipe.planner.descriptions import Cluster, DescriptionError, cluster
from evenpipe.planner.estimate import Estimate
from evenpipe.planner.run import EstimateError
from evenpipe.recipes import RecipeError
from evenpipe.recipes.from_flags import convert, read_line
from evenpipe.settings.spelling import in_flags

__all__ = ["show_converted"]

_CLUSTER = "a100-80gb"
_SECTION = '"evenpipe": { "schedule": "1f1b", "bpipe": true }'


def show_converted(words: Sequence[str], on: str | None) -> None:
    """Print the difference and the new line. UsageError, one line, for what cannot be told or does not fit."""
    try:
        line = read_line(words[1:] if words[:1] == ["--"] else words)
        nodes = cluster(on) if on else _least(line.flags)
        found = convert(line, nodes)
    except (RecipeError, FlagError, DescriptionError) as error:
        raise UsageError(in_megatron(str(error))) from error
    except EstimateError as error:
        raise UsageError(in_megatron(in_flags(error))) from error
    print("\n".join(found.diff))
    print()
    if found.before is not None and found.after is not None:
        print(f"now:           {_said(found.before)}")
        print(f"with EvenPipe: {_said(found.after)} (on {nodes.name})")
    else:
        print(f"and in DeepSpeed's configuration, such as: {_SECTION}")
    print()
    print(found.command)


def _least(flags: Sequence[str]) -> Cluster:
    """As many GPUs of the usual kind as one replica needs."""
    found = cluster(_CLUSTER)
    least, gpus = least_gpus(flags), found.gpus_per_node
    nodes, each = (1, least) if least < gpus else (math.lcm(least, gpus) // gpus, gpus)
    return cluster(f"{nodes}x{each}-{_CLUSTER}")


def _said(estimate: Estimate) -> str:
    most = max(stage.bytes.total for stage in estimate.stages) / 2**30
    fits = "fits" if estimate.fits else "does not fit"
    return f"{estimate.iteration_ms:,.0f} ms an iteration, MFU {estimate.mfu:.1%}, {most:.1f} GiB at most: {fits}"
