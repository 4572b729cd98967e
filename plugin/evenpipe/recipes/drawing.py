"""A recipe as a picture: each stage's memory against its device's, and the schedule on the simulator's clock."""

from __future__ import annotations

from pathlib import Path

from evenpipe.recipes.recipe import Recipe
from evenpipe.report.stages import draw_stages
from evenpipe.report.timeline import Timeline
from evenpipe.schedule import Link, Programs, Size, partner
from evenpipe.simulate import Costs, Wire, simulate

__all__ = ["draw"]

_GIB = 2**30


def draw(recipe: Recipe, path: Path, title: str) -> None:
    """A PNG. Of a batch with many micro-batches a shorter one is drawn, in which the pipeline still fills and empties.

    OSError when it cannot be written.
    """
    found = recipe.estimate
    held = [stage.bytes for stage in found.stages]
    parts = {
        "weights, gradients, optimizer": [(one.weights + one.gradients + one.optimizer) / _GIB for one in held],
        "saved activations": [one.activations / _GIB for one in held],
        "rest": [(one.total - one.weights - one.gradients - one.optimizer - one.activations) / _GIB for one in held],
    }
    draw_stages(path, title, parts, recipe.cluster.device.memory_gib, _timeline(recipe))


def _timeline(recipe: Recipe) -> Timeline:
    run, stages = recipe.estimate.run, recipe.estimate.stages
    spec = run.spec
    least = 2 * run.stages if run.stages <= 16 else run.stages + run.stages // 2
    whole = max(run.group_size, run.stages if run.chunks > 1 else 1)
    micro_batches = min(run.micro_batches, -(-least // whole) * whole)
    size = spec.fitted(Size(run.stages, micro_batches, run.chunks, run.group_size, 2 if "stream" in spec.needs else 1))
    wires: dict[Link, Wire] = {}
    for stage in range(run.stages // 2 if run.bpipe else 0):
        other, wire = partner(stage, run.stages), Wire(transmit_ms=stages[stage].eviction_ms)
        wires |= {Link("evict", stage, other): wire, Link("load", other, stage): wire}
    forward, backward = (tuple(getattr(stage, field) for stage in stages) for field in ("forward_ms", "backward_ms"))
    program = Programs(spec, run.bpipe, run.queues)(size)
    return Timeline.of(simulate(program, Costs(forward, backward, links=wires)), "", micro_batches)
