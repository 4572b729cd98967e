"""Every run of a question, with bounds on its time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from evenpipe.planner.positions import positions_of
from evenpipe.planner.run import Run
from evenpipe.planner.search.blocks import Divided
from evenpipe.planner.search.bounds import least_bytes, least_end_ms, least_live, least_ms, unlike
from evenpipe.planner.search.families import Family, families_of
from evenpipe.planner.search.question import Question
from evenpipe.planner.search.space import Shape, shapes, ways
from evenpipe.planner.time.calibration import FITTED
from evenpipe.planner.time.hand_over import hand_over, message_bytes_of
from evenpipe.planner.time.kernels import Kernels

__all__ = ["Candidate", "candidates"]


class Candidate(NamedTuple):
    """``ms``: of a sample, at least, times the iterations that the same loss takes; ``nbytes``: of the fullest stage.

    ms is 0 where that is too much already.
    order: of equals, what comes first: without BPipe, with fewer parts. allowed: a plan may have it.
    """

    ms: float
    order: tuple[int, ...]
    nbytes: int
    run: Run
    families: tuple[Family, ...]
    allowed: bool


def candidates(question: Question) -> Iterator[Candidate]:
    """All of them, what does not fit too."""
    divided = Divided(question.model, question.cluster)
    before = 0
    for shape in shapes(question, divided):
        for candidate in _of_shape(question, shape, before):
            before += 1
            yield candidate


def _of_shape(question: Question, shape: Shape, before: int) -> Iterator[Candidate]:
    run, device, cluster = shape.run, question.cluster.device, question.cluster
    have = device.memory_gib * 2**30
    message_bytes = message_bytes_of(question.model, run)
    parts = shape.profile.parts(run.stages, run.chunks, run.layout) if shape.nbytes <= have else []
    for number, way in enumerate(ways(run, question.schedules, question.bpipe), before):
        split, stream = "split" in way.spec.needs, "stream" in way.spec.needs
        sharded = stream and max(run.tensor, run.expert) > 1 and not question.engine.delayed_sharded
        allowed = not question.refused(way.spec) and not sharded
        if way.bpipe and not allowed:
            continue
        where = positions_of(way.places)
        nbytes = shape.nbytes
        for stage in unlike(parts, where) if parts else ():
            if nbytes <= have:
                live = least_live(way.spec, way.size, way.bpipe)
                least = least_bytes(parts, where, stage, live[stage], 2 if stream else 1, run, message_bytes, device)
                nbytes = max(nbytes, least)
        tried = replace(run, schedule=way.spec.name, bpipe=way.bpipe, group_size=way.size.group_size)
        if stream:
            tried = replace(tried, overlap_parameters=False)
        ms = 0.0
        if nbytes <= have:
            kernels = Kernels(tried, cluster, FITTED)
            over = hand_over(question.model, tried, kernels.links)
            ms = least_ms(parts, where, tried, over, split, stream) + least_end_ms(parts, where, tried, kernels)
        yield Candidate(
            ms / run.global_batch * tried.iterations,
            (way.bpipe, run.stages * run.chunks, way.size.group_size, number),
            nbytes,
            tried,
            tuple(families_of(tried, allowed)),
            allowed,
        )
