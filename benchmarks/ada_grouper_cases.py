"""What `figures_ada_grouper.py` shows: GPTs and U-Nets in groups, on networks of which others leave some.

Stage times are the planner's and the partitioner's, by rooflines of the paper's devices; a message takes its bytes over
what is left of the link. A pipeline's length is the tuner's own estimate of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from unet import IMAGE, UNet

from evenpipe.descriptions import Cluster, cluster, device, model
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.dawnpiper.problem import PartitionError
from evenpipe.partition.profiling import Profiles
from evenpipe.partition.search.finding import find_plan
from evenpipe.partition.timing import Roofline
from evenpipe.partition.trace import Graph, trace, weightless
from evenpipe.planner.counted_flops import model_flops
from evenpipe.planner.estimate import Estimate, Estimator
from evenpipe.planner.run import EstimateError, Run
from evenpipe.schedule import Link, Programs
from evenpipe.tuner.grouped import Candidate, GroupedSchedule, StageTimes, estimate_ms
from evenpipe.tuner.tuner import Tuner

__all__ = ["GROUPS", "figure_6", "figure_7", "figure_8", "figure_9", "figure_10"]

GROUPS: Final = range(1, 7)
#: Of a link, what others leave. The paper does not know what they left (§6, line 208).
LEFT: Final = (1.0, 0.5, 0.25, 0.125, 0.0625)
TWO: Final = (1.0, 0.25)
#: §6.1: a GPU a worker, each in a machine of its own.
PLATFORMS: Final = {"C1x": "ada-grouper-c1x", "S1": "ada-grouper-s1", "M8s": "ada-grouper-m8s"}
GBPS: Final = {"C1x": 25 / 8, "S1": 100 / 8, "M8s": 100 / 8}
LATENCY_MS: Final = 0.04
#: Of Figure 8: workers and the model that they train (Table 1, line 191).
WEAK: Final = {1: "gpt-medium", 2: "gpt-large", 4: "gpt-xl", 8: "gpt-2.7b"}
#: Figure 10: what others leave in each of four hours.
HOURS: Final = (0.25, 0.2, 1.0, 0.25)
#: GiB of a V100 of 32 GB, less a device's own.
LIMIT_BYTES: Final = 30 * 2**30
DIMENSIONS: Final = {"UNet-Base": 64, "UNet-Medium": 320}


class Pipeline(NamedTuple):
    """Stage times of a micro-batch, and bytes of each message to the next stage."""

    times: StageTimes
    message_bytes: tuple[int, ...]

    def message_ms(self, gbps: float) -> dict[Link, float]:
        """Both ways, by link."""
        found: dict[Link, float] = {}
        for stage, nbytes in enumerate(self.message_bytes):
            ms = nbytes / (gbps * 1e6) + LATENCY_MS
            found |= {Link("forward", stage, stage + 1): ms, Link("backward", stage + 1, stage): ms}
        return found


def machines(platform: str, workers: int) -> Cluster:
    return cluster(PLATFORMS[platform]).of_size(workers, 1).model_copy(update={"node_gbps": GBPS[platform]})


@cache
def estimator(name: str, platform: str, workers: int) -> Estimator:
    return Estimator(model(name), machines(platform, workers))


@cache
def layout(name: str, platform: str, workers: int) -> tuple[int, ...]:
    """Layers of each stage, of which the last computes the output too, so that the longest is as short as it can be."""
    layers = model(name).layers

    def longest(laid: tuple[int, ...]) -> float:
        shown = estimator(name, platform, workers)(Run(workers, stages=workers, layout=laid))
        return max(stage.forward_ms + stage.backward_ms for stage in shown.stages)

    every = []
    for last in range(layers // workers + 1):
        each, more = divmod(layers - last, max(1, workers - 1))
        every.append((*(each + (stage < more) for stage in range(workers - 1)), last))
    return min((laid for laid in every if sum(laid) == layers), key=longest)


def gpt_run(name: str, platform: str, workers: int, samples: int, one: Candidate) -> Estimate:
    """On a quiet network, as the planner has it; only its stages and memory are looked at."""
    grouped, laid = workers > 1, layout(name, platform, workers)
    run = Run(samples, stages=workers, micro_batch=one.b, layout=laid)
    return estimator(name, platform, workers)(replace(run, schedule="kfkb", group_size=one.k) if grouped else run)


@cache
def gpt(name: str, platform: str, workers: int, size: int) -> Pipeline:
    """A GPT's pipeline with micro-batches of a size."""
    shown = gpt_run(name, platform, workers, size * workers, Candidate(1, size, workers))
    times = StageTimes(
        *(tuple(getattr(stage, f"{way}_ms") for stage in shown.stages) for way in ("forward", "backward"))
    )
    of = model(name)
    return Pipeline(times, (size * of.sequence * of.hidden * 2,) * (workers - 1))


@cache
def schedule(workers: int) -> GroupedSchedule:
    return GroupedSchedule(Programs("kfkb"), workers)


def batch_ms(pipeline: Pipeline, workers: int, one: Candidate, gbps: float) -> float:
    return estimate_ms(schedule(workers).program(one), pipeline.times, pipeline.message_ms(gbps))


def finer(samples: int, most: int = 6) -> list[Candidate]:
    """Figures 6 and 10: groups of k micro-batches of 6/k samples; of whole ones, so that k = 4 and 5 have 1."""
    return [Candidate(k, most // k, samples // (most // k)) for k in GROUPS]


def entry(figure: str, left: float, one: Candidate, samples: int, ms: float, **about: Any) -> dict[str, Any]:
    return {
        "figure": figure,
        **about,
        "left": left,
        "k": one.k,
        "b": one.b,
        "ms": ms,
        "samples_per_second": 1e3 * samples / ms,
    }


def figure_6() -> Iterator[dict[str, Any]]:
    """GPT-Medium on 8 workers of S1, 192 samples."""
    for left in LEFT:
        for one in finer(192):
            ms = batch_ms(gpt("gpt-medium", "S1", 8, one.b), 8, one, GBPS["S1"] * left)
            yield entry("6", left, one, 192, ms, model="gpt-medium", platform="S1", workers=8)


def largest_that_fits(samples: int, fits: Any, groups: Sequence[int]) -> Iterator[Candidate]:
    """The memory-limit curve (§4.2), of sizes that are powers of two: for each k the largest that fits."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if samples % size == 0]
    for k in groups:
        for size in reversed(sizes):
            one = Candidate(k, size, samples // size)
            if k <= one.m and fits(one):
                yield one
                break


def figure_7() -> Iterator[dict[str, Any]]:
    """U-Nets on M8s, 128 samples a worker, cut by the partitioner."""
    for name in DIMENSIONS:
        for workers in (2, 4, 8):
            samples = 128 * workers
            found = list(
                largest_that_fits(samples, lambda one, n=workers, u=name: unet(u, n, one) is not None, range(1, 5))
            )
            for left in TWO:
                for one in found:
                    pipeline = unet(name, workers, one)
                    assert pipeline is not None
                    ms = batch_ms(pipeline, workers, one, GBPS["M8s"] * left)
                    yield entry("7", left, one, samples, ms, model=name, platform="M8s", workers=workers)


@cache
def profiles(name: str) -> Profiles:
    """A U-Net's, traced node by node."""

    def graph_of(size: int) -> Graph:
        dimensions = DIMENSIONS[name]
        with weightless():
            traced, image = UNet(dimensions), torch.zeros(size, 3, IMAGE, IMAGE)
            inputs = {"image": image, "time": torch.zeros(size, dimensions), "noise": torch.zeros_like(image)}
        return trace(traced, inputs)

    return Profiles(graph_of, Roofline(device("v100-32gb")), name)


@cache
def unet(name: str, workers: int, one: Candidate) -> Pipeline | None:
    """Its best cuts for the schedule; None where nothing fits."""
    profile = profiles(name).at(one.b)
    try:
        plan = find_plan(
            profile, Workload("kfkb", min(one.m, 2 * workers * one.k), group_size=one.k), workers, LIMIT_BYTES
        )
    except PartitionError:
        return None
    times = StageTimes(
        *(tuple(getattr(stage, f"{way}_ms") for stage in plan.stages) for way in ("forward", "backward"))
    )
    return Pipeline(times, tuple(profile.nodes[stage.last_node].cut_bytes for stage in plan.stages[:-1]))


def figure_8() -> Iterator[dict[str, Any]]:
    """GPTs that grow with the workers, 64 samples."""
    for platform in PLATFORMS:
        for workers, name in WEAK.items():
            yield from gpt_figure("8", name, platform, workers, None)


def figure_9() -> Iterator[dict[str, Any]]:
    """GPT-Medium, 64 samples one by one; and replicas instead of stages, 8 samples at once."""
    for platform in PLATFORMS:
        for workers in (2, 4, 8):
            yield from gpt_figure("9", "gpt-medium", platform, workers, 1)
            for left in TWO:
                machine = machines(platform, workers)
                slower = machine.model_copy(update={"node_gbps": machine.node_gbps * left})
                shown = Estimator(model("gpt-medium"), slower)(Run(64, data=workers, micro_batch=8))
                about = {"model": "gpt-medium", "platform": platform, "workers": workers, "replicas": True}
                yield entry("9", left, Candidate(1, 8, 1), 64, shown.iteration_ms, **about)


def gpt_figure(figure: str, name: str, platform: str, workers: int, size: int | None) -> Iterator[dict[str, Any]]:
    """Groups up to 6, with micro-batches of a size, or of the largest that fits each."""

    def fits(one: Candidate) -> bool:
        try:
            return (size is None or one.b == size) and gpt_run(name, platform, workers, 64, one).fits
        except EstimateError:
            return False

    found = list(largest_that_fits(64, fits, GROUPS if workers > 1 else [1]))
    flops = model_flops(model(name), Run(64, precision="fp16"))
    for left in TWO:
        for one in found:
            pipeline = gpt(name, platform, workers, one.b)
            if workers == 1:
                ms = one.m * (pipeline.times.forward_ms[0] + pipeline.times.backward_ms[0])
            else:
                ms = batch_ms(pipeline, workers, one, GBPS[platform] * left)
            about = {"model": name, "platform": platform, "workers": workers, "tflops": flops / ms / 1e9}
            yield entry(figure, left, one, 64, ms, **about)


def figure_10() -> Iterator[dict[str, Any]]:
    """The tuner itself, which is told what messages take once an hour, on GPT-Medium, 8 workers of S1, 192 samples."""
    every = finer(192)
    pipelines = {one.b: gpt("gpt-medium", "S1", 8, one.b) for one in every}
    tuner = Tuner(schedule(8), every, {size: pipeline.times for size, pipeline in pipelines.items()}, interval=1)
    for hour, left in enumerate(HOURS):
        for one in every:
            for link, ms in pipelines[one.b].message_ms(GBPS["S1"] * left).items():
                tuner.observe(one, link, [ms] * 5)
        chosen, estimates, following = tuner.decide(hour)
        tuner.adopt(hour, chosen, estimates, following)
        for one, ms in zip(every, estimates, strict=True):
            about = {"model": "gpt-medium", "platform": "S1", "workers": 8, "hour": hour + 1, "chosen": one == chosen}
            yield entry("10", left, one, 192, ms, **about)
