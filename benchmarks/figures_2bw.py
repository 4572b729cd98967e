"""Throughput and memory of PipeDream-2BW and its peers, as its Figures 6, 7 and 8 draw them: by the planner.

Estimated, not run: the planner's memory model, and its simulator with the planner's times of V100s of 16 GB, on one
server of eight and on eight with 25 Gb/s each (§5). GPT and BERT of 2.2 billion parameters in pipelines of 8 stages, of
3.8 billion in pipelines of 16. Peers: model parallelism between layers without pipelining (a micro-batch an iteration),
GPipe, 1F1B with flushes (PipeDream-Flush), 2BW. Tensor parallelism is left out: 8 does not divide the 20 heads.

Figures 6 and 7, as §5.2 has it: all recompute; all have the largest micro-batches with which 2BW fits and can fill its
pipeline at the small batch; GPipe flushes after as many as fit. Of batch sizes the text names 64 (line 357) and 2,048
(line 336); the others are a quarter of 2,048, and four times 64. The table after it gives each system the micro-batch
size, and the placement of ranks, that make it fastest, with and without recomputation and BPipe. Figure 8: the fullest
GPU of eight with a batch of 64 in micro-batches of 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from figures_2bw_picture import draw
from harness import Benchmark, progress_bar
from rich.console import Group
from rich.table import Table

from evenpipe.descriptions import cluster, model
from evenpipe.planner.estimate import Estimate, Estimator
from evenpipe.planner.run import EstimateError, Placement, Recompute, Run

SYSTEMS: Final = {"inter-layer": "1f1b", "gpipe": "gpipe", "1f1b": "1f1b", "2bw": "2bw"}
RECOMPUTED: Final[tuple[Recompute, ...]] = ("full", "none")
PLACED: Final[tuple[Placement, ...]] = ("replicas", "pipeline")
SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
#: What is switched on, (recompute, bpipe), as columns.
COLUMNS: Final = {
    ("full", False): "recompute",
    ("full", True): "recompute + BPipe",
    ("none", False): "neither",
    ("none", True): "BPipe",
}
BEST: Final = "The fastest that fits: samples/s (b, fullest GPU)"
#: §5.2 of the paper: the more of `over`, its line, what it says, and which batches it says it of (0: small, 1: large).
SAID: Final = (
    ("1f1b", "inter-layer", "line 332: up to 4.1 at small batches", 0),
    ("1f1b", "inter-layer", "line 332: up to 5.3 at large ones", 1),
    ("2bw", "inter-layer", "line 332: up to 6.1", None),
    ("2bw", "gpipe", "line 334: up to 3.2", None),
    ("1f1b", "gpipe", "line 334: 2.1 at low batch sizes", 0),
    ("1f1b", "gpipe", "line 334: 3 at high ones", 1),
    ("2bw", "1f1b", "line 336: up to 1.6 at low batch sizes", 0),
    ("2bw", "1f1b", "line 336: 1.15 at 2,048", 1),
)


class Panel(NamedTuple):
    """A part of a figure."""

    figure: str
    model: str
    cluster: str
    stages: int
    batches: tuple[int, int]

    @property
    def width(self) -> int:
        """Pipelines."""
        return cluster(self.cluster).gpus // self.stages

    def estimator(self) -> Estimator:
        return Estimator(model(self.model), cluster(self.cluster))


PANELS: Final = tuple(
    Panel(f"{figure}{letter}", f"{kind}-{billion}", nodes, stages, batches)
    for figure, kind in ((6, "gpt2"), (7, "bert"))
    for letter, billion, nodes, stages, batches in (
        ("a", "2.2b", "1x8-v100-16gb", 8, (64, 256)),
        ("b", "2.2b", "8x8-v100-16gb", 8, (512, 2048)),
        ("c", "3.8b", "8x8-v100-16gb", 16, (512, 2048)),
    )
)


def run_of(panel: Panel, system: str, batch: int, micro_batch: int, **more: Any) -> Run:
    """A run of a system; without pipelining a batch is a micro-batch of every pipeline."""
    samples = micro_batch * panel.width if system == "inter-layer" else batch
    given: dict[str, Any] = {
        "stages": panel.stages,
        "data": panel.width,
        "micro_batch": micro_batch,
        "recompute": "full",
    }
    return Run(samples, **given | more, schedule=SYSTEMS[system])


def admitted(estimate: Estimator, panel: Panel, system: str, batch: int, micro_batch: int, **more: Any) -> Estimate:
    """The estimate that fits; of GPipe with as few micro-batches between flushes as that takes, else as it is."""
    shown = estimate(run_of(panel, system, batch, micro_batch, **more))
    if system == "gpipe":
        between = batch // (micro_batch * panel.width)
        while not shown.fits and between > 1:
            between = max(n for n in range(1, between) if batch // (micro_batch * panel.width) % n == 0)
            shown = estimate(run_of(panel, system, between * micro_batch * panel.width, micro_batch, **more))
    return shown


def papers_micro_batch(estimate: Estimator, panel: Panel) -> int:
    """The largest with which 2BW fits, recomputed, and has as many micro-batches as stages (m = d·g, §5.2)."""
    small = panel.batches[0]
    sizes = [b for b in SIZES if small % (b * panel.width) == 0 and small // (b * panel.width) >= panel.stages]
    return max(b for b in sizes if estimate(run_of(panel, "2bw", small, b)).fits)


def as_published(panel: Panel) -> Iterator[dict[str, Any]]:
    """Figures 6 and 7: each batch size and system."""
    estimate = panel.estimator()
    size = papers_micro_batch(estimate, panel)
    for batch in panel.batches:
        for system in SYSTEMS:
            yield entry(panel, batch, system, admitted(estimate, panel, system, batch, size))


def at_their_best(panel: Panel) -> Iterator[dict[str, Any]]:
    """The fastest run of each that fits, with and without recomputation and BPipe."""
    estimate = panel.estimator()
    for batch in panel.batches:
        for system in SYSTEMS:
            for recompute in RECOMPUTED:
                for bpipe in (False, True)[: 1 + (system in ("1f1b", "2bw"))]:
                    yield entry(panel, batch, system, fastest(estimate, panel, system, batch, recompute, bpipe))


def fastest(
    estimate: Estimator, panel: Panel, system: str, batch: int, recompute: Recompute, bpipe: bool
) -> Estimate | None:
    """None where nothing fits."""
    best: Estimate | None = None
    for placement in PLACED:
        for size in (b for b in SIZES if batch % (b * panel.width) == 0):
            more = {"recompute": recompute, "bpipe": bpipe, "placement": placement}
            try:
                shown = admitted(estimate, panel, system, batch, size, **more)
            except EstimateError:  # 2BW has no pipeline of fewer micro-batches than stages
                continue
            if shown.fits and (best is None or shown.samples_per_second > best.samples_per_second):
                best = shown
    return best


def footprints(name: str) -> Iterator[dict[str, Any]]:
    """Figure 8, each with and without recomputation and BPipe; whether it fits or not."""
    panel = Panel("8", name, "1x8-v100-16gb", 8, (64, 64))
    estimate = panel.estimator()
    for system in SYSTEMS:
        for recompute in RECOMPUTED:
            for bpipe in (False, True)[: 1 + (system in ("1f1b", "2bw"))]:
                shown = estimate(run_of(panel, system, 64, 8, recompute=recompute, bpipe=bpipe))
                yield entry(panel, 64, system, shown)


def entry(panel: Panel, batch: int, system: str, shown: Estimate | None) -> dict[str, Any]:
    """One bar of a figure; only what it is of, where nothing fits."""
    about: dict[str, Any] = {"figure": panel.figure, "model": panel.model, "cluster": panel.cluster}
    about |= {"stages": panel.stages, "batch": batch, "system": system}
    if shown is None:
        return about
    run = shown.run
    about |= {"recompute": run.recompute, "bpipe": run.bpipe, "micro_batch": run.micro_batch}
    about |= {"between_flushes": run.micro_batches, "samples_per_second": shown.samples_per_second}
    return about | {"gib": max(stage.bytes.total for stage in shown.stages) / 2**30, "fits": shown.fits}


def readings(published: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What §5.2 says of Figure 6, and the largest such ratio of ours: of GPT with 2.2 billion parameters."""
    of = {(one["figure"], one["batch"], one["system"]): one["samples_per_second"] for one in published}
    panels = [panel for panel in PANELS if panel.figure in ("6a", "6b")]
    found = []
    for system, over, said, which in SAID:
        batches = [(panel, n) for panel in panels for n in panel.batches if which in (None, panel.batches.index(n))]
        if said.endswith("2,048"):
            batches = [(panel, n) for panel, n in batches if n == 2048]
        ratio = max(of[panel.figure, n, system] / of[panel.figure, n, over] for panel, n in batches)
        found.append({"system": system, "over": over, "paper": said, "ratio": ratio})
    return found


def tables(results: dict[str, list[dict[str, Any]]]) -> Group:
    """The same for people."""
    figures = Table("figure", "model", "GPUs", "batch", "system", "b", "m", "samples/s", "GiB", title="Figures 6 and 7")
    for one in results["published"]:
        sizes = [str(one[key]) for key in ("micro_batch", "between_flushes")]
        figures.add_row(one["figure"], *about_of(one), *sizes, f"{one['samples_per_second']:.1f}", f"{one['gib']:.1f}")
    best = Table("model", "GPUs", "batch", "system", *COLUMNS.values(), title=BEST)
    for about, of in groupby(results["best"], key=lambda one: about_of(one)[:4]):
        shown = {(one.get("recompute"), one.get("bpipe")): briefly(one) for one in of if "gib" in one}
        best.add_row(*about, *(shown.get(column, "–") for column in COLUMNS))
    eight = Table("model", "system", "GiB", "fits 16 GB", title="Figure 8: batch 64, b = 8")
    for one in results["footprints"]:
        eight.add_row(one["model"], named(one), f"{one['gib']:.1f}", "yes" if one["fits"] else "no")
    said = Table("throughput of", "over", "here, up to", "the paper", title="What the paper says of Figure 6")
    for one in results["readings"]:
        said.add_row(one["system"], one["over"], f"{one['ratio']:.2f}", one["paper"])
    return Group(figures, said, best, eight)


def by_part(results: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """A document's results as `tables` and `draw` take them."""
    found: dict[str, list[dict[str, Any]]] = {"published": [], "best": [], "footprints": [], "readings": []}
    for one in results:
        found[one["part"]].append({key: value for key, value in one.items() if key != "part"})
    return found


def about_of(one: dict[str, Any]) -> list[str]:
    """Cells that say what a bar is of."""
    return [one["model"], str(cluster(one["cluster"]).gpus), f"{one['batch']:,}", one["system"]]


def briefly(one: dict[str, Any]) -> str:
    """Throughput, and with what."""
    return f"{one['samples_per_second']:.1f} (b={one['micro_batch']}, {one['gib']:.1f} GiB)"


def named(one: dict[str, Any]) -> str:
    """A system with what is switched on."""
    more = " + recompute" * (one.get("recompute") == "full") + " + BPipe" * one.get("bpipe", False)
    return cast(str, one["system"]) + more


def main() -> None:
    benchmark = Benchmark("figures_2bw", __doc__ or "", repeats=1)
    every = sorted({panel.model for panel in PANELS})
    benchmark.parser.add_argument("--models", nargs="+", choices=every, default=every, help="(default: all)")
    benchmark.parser.add_argument("--picture", type=Path, metavar="P.png", help="Figures 6, 7 and 8")
    arguments = benchmark.parser.parse_args()
    panels = [panel for panel in PANELS if panel.model in arguments.models]
    results: dict[str, list[dict[str, Any]]] = {"published": [], "best": [], "footprints": []}
    with progress_bar("panels", len(panels)) as tick:
        for panel in panels:
            results["published"] += as_published(panel)
            results["best"] += at_their_best(panel)
            if panel.figure.endswith("a"):
                results["footprints"] += footprints(panel.model)
            tick()
    whole = {"gpt2-2.2b"} <= set(arguments.models)
    results["readings"] = readings(results["published"]) if whole else []
    if arguments.picture is not None:
        draw(arguments.picture, results)
    flat = [{"part": part, **one} for part, entries in results.items() for one in entries]
    benchmark.report({"estimated": True}, flat, tables(results))


if __name__ == "__main__":
    main()
