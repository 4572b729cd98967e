"""A layout that is given: whether it fits a cluster, its slowest stage, and how far it is from the best."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

import numpy as np

from evenpipe.descriptions import Cluster, framework
from evenpipe.layouts.gpt import Gpt, LayoutError, Pipeline
from evenpipe.layouts.layers import Layer, described, layers_of
from evenpipe.layouts.plan import FlagsRead, plan_layout, read_flags
from evenpipe.layouts.split import Cuts, Problem
from evenpipe.planner.estimate import Estimate, Estimator
from evenpipe.planner.run import EstimateError, Run
from evenpipe.planner.uncertainty import EQUAL
from evenpipe.recipes.megatron import unrolled

__all__ = ["CheckedLayout", "check_layout", "checked", "cuts_of"]

_GIB: Final = 2**30


@dataclass(frozen=True)
class CheckedLayout:
    """A layout, the best one, and the planner's estimates of a run with each."""

    layout: str
    estimate: Estimate
    best: str
    best_estimate: Estimate

    @property
    def slower(self) -> float:
        """Return by what part of the best layout's iteration this one takes longer; below 0 where it is faster."""
        return self.estimate.iteration_ms / self.best_estimate.iteration_ms - 1

    @property
    def slowest(self) -> int:
        """Return the stage that computes longest for a micro-batch."""
        each = [stage.forward_ms + stage.backward_ms for stage in self.estimate.stages]
        return each.index(max(each))

    @property
    def problem(self) -> str | None:
        """Return what is wrong, in a line; None: it fits, and no layout is more than 2 % faster."""
        if not self.estimate.fits:
            return str(self.estimate.reason)
        if self.slower > EQUAL - 1:
            return f"{self.slower:.1%} slower than '{self.best}'"
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the document ``evenpipe.layout-check/1``."""
        return {
            "format": "evenpipe.layout-check/1",
            "problem": self.problem,
            "layout": self.layout,
            "slower": self.slower,
            "slowest_stage": self.slowest,
            "estimate": self.estimate.to_json(),
            "best": self.best,
            "best_estimate": self.best_estimate.to_json(),
        }


def check_layout(flags: Sequence[str], layout: str, where: Cluster) -> CheckedLayout:
    """Estimate a run of pretrain_gpt.py's flags with ``layout``, and with the best one, on all GPUs of a cluster.

    Raises LayoutError, one line.
    """
    return checked(read_flags(flags, where.gpus, measure=False), layout, where)


def checked(read: FlagsRead, layout: str, where: Cluster) -> CheckedLayout:
    """Return the same for flags that have been read, for as many GPUs as the cluster has. Raises LayoutError."""
    gpt, pipeline, mtp_apart, _ = read
    parts = _parts_in(layout)
    if len(parts) % pipeline.stages:
        raise LayoutError(f"{layout}: has {len(parts)} parts: give a multiple of the {pipeline.stages} stages")
    chunks = len(parts) // pipeline.stages
    if pipeline.chunks not in (1, chunks):
        raise LayoutError(
            f"{layout}: has {chunks} parts a stage, and the flags {pipeline.chunks} virtual stages: change one of them"
        )
    pipeline = replace(pipeline, chunks=chunks)
    layers = layers_of(gpt, described(gpt, where.device))
    problem = Problem(layers, pipeline, mtp_apart and pipeline.placed_by is None)
    cuts = cuts_of(layout, layers)
    if not problem.allowed(np.array([cuts], np.int64)).all():
        raise LayoutError(f"{layout}: Megatron takes no such layout: E is in the first part, L and what predicts last")
    estimate = Estimator(gpt.model, where, framework("megatron"))
    try:
        given = estimate(_run(gpt, pipeline, parts))
        others = [(text, estimate(_run(gpt, pipeline, unrolled(text)))) for text in _best(problem, gpt, where)]
    except EstimateError as error:
        raise LayoutError(str(error)) from error
    best = min([(layout, given), *others], key=lambda one: (not one[1].fits, one[1].iteration_ms))
    return CheckedLayout(layout, given, *best)


def _best(problem: Problem, gpt: Gpt, where: Cluster) -> list[str]:
    """The layouts whose slowest stage is fastest: of all, and of those whose weights and activations fit."""
    found = []
    for limit in (None, int((where.device.memory_gib - where.device.reserve_gib) * _GIB)):
        with suppress(LayoutError):  # none fits
            found.append(
                plan_layout(
                    problem.layers,
                    problem.pipeline,
                    mtp_apart=problem.mtp_apart,
                    source="estimated",
                    limit_bytes=limit,
                    gpt=gpt,
                ).layout
            )
    return list(dict.fromkeys(found))


def _run(gpt: Gpt, pipeline: Pipeline, parts: Sequence[str]) -> Run:
    return replace(
        gpt.run,
        chunks=pipeline.chunks,
        schedule=pipeline.schedule,
        layout=tuple(part.count("t") for part in parts),
        further_part=next((number for number, part in enumerate(parts) if "m" in part), None),
    )


def _parts_in(layout: str) -> list[str]:
    """Return the layout's parts. Raises LayoutError for symbols that are none."""
    parts = unrolled(layout)
    if odd := re.sub(r"[EtmL]", "", "".join(parts)):
        raise LayoutError(f"{layout}: {odd!r} in it: give E, t, m and L, parts with | between, (…)*N for N in a row")
    return parts


def cuts_of(layout: str, layers: Sequence[Layer]) -> Cuts:
    """Return where a layout cuts these layers. Raises LayoutError where it has others, or cuts what is one."""
    parts, whole = _parts_in(layout), "".join(layer.symbols for layer in layers)
    given = "".join(parts)
    if given != whole:
        said = ", ".join(f"{given.count(one)} {one}" for one in "EtmL")
        wanted = ", ".join(f"{whole.count(one)} {one}" for one in "EtmL")
        raise LayoutError(f"{layout}: has {said}; the model of these flags is {wanted}, in this order")
    before = list(accumulate(len(layer.symbols) for layer in layers))
    borders = {0: 0} | {symbols: number for number, symbols in enumerate(before, 1)}
    ends = list(accumulate(map(len, parts)))[:-1]
    if any(end not in borders for end in ends):
        raise LayoutError(f"{layout}: layers that predict further tokens (m) are in one part: put them together")
    return tuple(borders[end] for end in ends)
