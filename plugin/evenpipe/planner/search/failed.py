"""What to say where a search finds nothing: the argument that is too small, by how much, and what would do."""

from __future__ import annotations

import math
from typing import Final

from evenpipe.planner.search.question import Question

__all__ = ["nothing_fits"]

_GIB: Final = 2**30


def nothing_fits(question: Question, allowed: int, nearest: float) -> str:
    """One line. ``allowed``: how many runs might have been planned; ``nearest``: bytes of the smallest's fullest stage.

    With the option that is wrong at its head, by how much, and what would do.
    """
    model, cluster = question.model.name, question.cluster
    if allowed:
        have, need = cluster.device.memory_gib, nearest / _GIB
        where = f"fullest GPU needs {need:.1f} GiB and has {have:.1f}: {need - have:.1f} too few"
        return (
            f"cluster={cluster.name}: is smaller than {model}: of its smallest run the {where}: take about "
            f"{math.ceil(cluster.nodes * need / have)} such nodes, or GPUs with more memory"
        )
    any_depth = question.engine.uneven or question.stages is not None
    ways = [(t * c, p) for t in question.tensors for c, p in question.divisions(t)]
    replicas = [cluster.gpus // (ranks * p) for ranks, p in ways if any_depth or question.model.layers % p == 0]
    if not replicas:
        return (
            f"stages={question.stages}: {cluster.gpus} GPUs do not divide by so many, or {model} has fewer layers "
            f"({question.model.layers}): choose a smaller divisor"
        )
    if question.samples < min(replicas):
        return (
            f"global_batch_size={question.samples}: nothing reaches it: a run on {cluster.gpus} GPUs has at least "
            f"{min(replicas)} replicas, each with a sample: give at least {min(replicas)}, or a smaller cluster"
        )
    shares = [question.samples // each for each in replicas]
    if not any(question.micro_batches(each) for each in shares if each):
        return (
            f"micro_batch_size={question.micro_batch}: does not divide the samples of any number of replicas: choose a "
            f"divisor of {question.samples}"
        )
    if question.stages is not None and not question.engine.uneven and question.model.layers % question.stages:
        return (
            f"stages={question.stages}: {model}'s {question.model.layers} layers do not divide by so many, and "
            f"{question.of.name} has even stages only: choose a divisor, or another --framework"
        )
    return (
        f"schedules={','.join(question.schedules)}: no size of them divides {model}'s {question.model.layers} layers, "
        f"{question.samples} samples and {cluster.gpus} GPUs: allow others, or give another --global-batch-size"
    )
