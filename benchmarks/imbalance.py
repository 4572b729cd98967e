"""How uneven stages are, and what that costs: DawnPiper's Figures 2 to 4, its Appendix A and its §5.4.

The same profiles as `max_batch.py`. Waste: the part of all stages' memory that stays empty when the fullest is full.

    Figure 2     GPipe, 4 stages: waste, of layers cut for equal time (paper: 34 to 40 % for CNNs, 28 % for BERT)
    Figure 3     PipeDream, 8 stages: the same (paper: above 40 % for BERT), and of Algorithm 2's memory-balanced cuts
    Figure 4     the part of nodes whose activations are below 80 MB, and that consume below 150 MB (paper: 90 %)
    Appendix A   PipeDream, 4 stages: slowest stage of memory-balanced cuts over that of compute-balanced ones with
                 recomputation, at the largest batch that fits the former (paper: BERT 1.18, AmoebaNet 1.54, GPT-2 > 2)
    §5.4         T5, PipeDream, 8 stages, 2.5 times the largest batch of vPipe without memory optimisation, swap and
                 recompute: how much shorter the shortest stage is than the longest (paper: 7.7 %, vPipe 35.8 %), and
                 how many points more of the memory are used than by vPipe (paper: 17.8), and would be if every stage
                 were full that saves more than it can hold, which stages that take equally long cannot exceed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from harness import Benchmark, positive, progress_bar
from matplotlib.figure import Figure
from rich.table import Table
from rivals.algorithm_2 import printed_cuts
from rivals.layers import Layers
from rivals.profiles import DEVICE, EVERY, LIMIT_BYTES, MODELS, problem_of, profiles_of
from rivals.vpipe import vpipe

from evenpipe.partition.costs.matrices import Costs
from evenpipe.partition.dawnpiper.balance import Balance
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.profile import Profile
from evenpipe.partition.search.finding import find_plan, largest_batch

MB = 10**6
#: Figures 2 to 4, Appendix A, and §5.4.
PARTS = ("figures", "appendix", "detailed")


def waste(peaks: Sequence[float]) -> float:
    """The part of all stages' memory that is empty when the fullest is full."""
    return 1 - fmean(peaks) / max(peaks)


def wasted(profile: Profile, mode: str, stages: int) -> float:
    """Figures 2 and 3."""
    layers, problem = Layers(profile), problem_of(profile, mode, stages)
    copies = problem.copies
    spans = [layers.span(*ends) for ends in pairwise(layers.fastest(stages))]
    return waste(
        [
            span.static + (versions - 1) * span.weights + own * span.saved + span.messages
            for span, own, versions in zip(spans, copies.own, copies.versions, strict=True)
        ]
    )


def balanced_waste(profile: Profile, stages: int) -> float | None:
    """Of PipeDream's stages where Algorithm 2, as printed, balances their memory; None: it leaves some empty."""
    problem = problem_of(profile, "async", stages)
    cuts = printed_cuts(problem)
    return None if cuts is None else waste(problem.within(1 << 60).peaks(cuts) or [])


def distribution(profile: Profile) -> tuple[list[float], list[float]]:
    """Figure 4: bytes of each node, of activations and consumed, ascending."""
    activations = sorted(float(node.activation_bytes) for node in profile.nodes)
    return activations, sorted(float(node.activation_bytes - node.released_bytes) for node in profile.nodes)


def appendix(title: str, stages: int = 4) -> dict[str, Any]:
    """Appendix A."""

    def balanced(profile: Profile) -> tuple[int, ...]:
        return Balance(problem_of(profile, "async", stages)).memory_cuts()

    def fits(profile: Profile) -> bool:
        problem = problem_of(profile, "async", stages)
        peaks = problem.peaks(balanced(profile))
        return peaks is not None and max(peaks) <= LIMIT_BYTES

    batch = largest_batch(profiles_of(title), fits)
    profile = profiles_of(title)(batch)
    upto = Costs(profile).upto_ms
    by_memory = max(float(upto[last] - upto[first]) for first, last in pairwise(balanced(profile)))
    problem = problem_of(profile, "async", stages, "recompute")
    cuts = Balance(problem).compute_cuts()
    cells = [problem.cell(position, *ends) for position, ends in enumerate(pairwise(cuts))]
    by_compute = max(cell.ms if cell is not None else float("nan") for cell in cells)
    return {
        "what": "Appendix A",
        "model": title,
        "micro_batch_size": batch,
        "memory_ms": by_memory,
        "compute_ms": by_compute,
        "ratio": by_memory / by_compute,
    }


def detailed(stages: int = 8) -> dict[str, float]:
    """§5.4."""
    at = profiles_of("T5")

    def fits(profile: Profile) -> bool:
        return vpipe(Layers(profile), problem_of(profile, "async", stages), memory_aware=False) is not None

    batch = round(2.5 * largest_batch(at, fits))
    profile = at(batch)
    plan = find_plan(
        profile, Workload.of_mode("async", stages), stages, LIMIT_BYTES, "swap+recompute", DEVICE.host_gbps
    )
    rival = vpipe(Layers(profile), problem_of(profile, "async", stages, "swap+recompute"))
    ours_ms = [stage.forward_ms + stage.backward_ms + stage.extra_ms for stage in plan.stages]
    used = 100 * fmean(stage.peak_bytes for stage in plan.stages) / LIMIT_BYTES
    found = {"micro_batch_size": batch, "spread": 1 - min(ours_ms) / max(ours_ms), "used_percent": used}
    if rival is not None:
        rival_ms = [stage.ms for stage in rival.stages]
        rival_used = 100 * fmean(stage.peak_bytes for stage in rival.stages) / LIMIT_BYTES
        most = 100 * fmean(min(LIMIT_BYTES, stage.peak_bytes_before) for stage in plan.stages) / LIMIT_BYTES
        found |= {
            "rival_spread": 1 - min(rival_ms) / max(rival_ms),
            "points_more": used - rival_used,
            "points_more_at_most": most - rival_used,
        }
    return found


def draw(path: Path, profiles: dict[str, Profile]) -> None:
    """Figure 4: the distribution functions of activations and of what nodes consume."""
    figure = Figure(figsize=(9, 3.4), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for title, profile in profiles.items():
        for axes, values in zip(panels, distribution(profile), strict=True):
            axes.plot(np.array(values) / MB, np.arange(1, len(values) + 1) / len(values), label=title, linewidth=1.4)
    for axes, name in zip(panels, ("activations", "consumed"), strict=True):
        axes.set_title(f"{name} of a node, MB", loc="left", fontsize=9)
        axes.grid(color="#e6e6e2", linewidth=0.6)
        axes.tick_params(labelsize=8, length=0)
        axes.spines[:].set_visible(False)
    panels[0].set_xlim(0, 300)
    panels[1].set_xlim(-50, 300)
    panels[0].set_ylabel("part of nodes", fontsize=8)
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    benchmark = Benchmark("imbalance", __doc__ or "", repeats=1)
    benchmark.parser.add_argument("--micro-batch-size", type=positive, default=8, help="of Figures 2 to 4 (default 8)")
    benchmark.parser.add_argument("--picture", type=Path, metavar="P.png", help="draw Figure 4")
    benchmark.parser.add_argument(
        "--models", nargs="+", choices=EVERY, default=list(MODELS), help="(default: the paper's)"
    )
    benchmark.parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    arguments = benchmark.parser.parse_args()
    size = arguments.micro_batch_size
    work: list[Callable[[], dict[str, Any]]] = []
    for title in arguments.models:
        if "figures" in arguments.parts:
            work.append(partial(figures, title, size))
        if "appendix" in arguments.parts:
            work.append(partial(appendix, title))
    if "detailed" in arguments.parts:
        work.append(lambda: {"what": "§5.4", "model": "T5", **detailed()})
    results = []
    with progress_bar("parts", len(work)) as tick:
        for part in work:
            results.append(part())
            tick()
    if arguments.picture is not None:
        draw(arguments.picture, {title: profiles_of(title)(size) for title in arguments.models})
    benchmark.report({"micro_batch_size": size, "limit_bytes": LIMIT_BYTES}, results, table(results))


def figures(title: str, size: int) -> dict[str, Any]:
    """Figures 2 to 4 of one model."""
    profile = profiles_of(title)(size)
    activations, consumed = distribution(profile)
    parts = {
        f"{name}_mb_at_{part}_percent": float(np.percentile(values, part)) / MB
        for name, values in (("activations", activations), ("consumed", consumed))
        for part in (50, 80, 90, 99)
    }
    return {
        "what": "Figures 2–4",
        "model": title,
        "gpipe_waste": wasted(profile, "sync", 4),
        "pipedream_waste": wasted(profile, "async", 8),
        "algorithm_2_waste": balanced_waste(profile, 8),
        "activations_below_80_mb": fmean(nbytes < 80 * MB for nbytes in activations),
        "consumed_below_150_mb": fmean(nbytes < 150 * MB for nbytes in consumed),
        **parts,
    }


def table(results: list[dict[str, Any]]) -> Table:
    """The same for people."""
    shown = Table("", "model", "found")
    for row in results:
        found = (
            f"{name.replace('_', ' ')} {'–' if value is None else f'{value:.4g}'}"
            for name, value in row.items()
            if name not in ("what", "model")
        )
        shown.add_row(row["what"], row["model"], ", ".join(found))
    return shown


if __name__ == "__main__":
    main()
