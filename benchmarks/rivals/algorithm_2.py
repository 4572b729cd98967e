"""DawnPiper's Algorithm 2 (Appendix B.1) as printed, which evens out running peaks of memory."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

from evenpipe.partition.dawnpiper.problem import Problem
from evenpipe.partition.profile import Node

__all__ = ["one_copy_bytes", "printed_cuts", "running_peak_cuts"]


def running_peak_cuts(nodes: Sequence[Node], total_bytes: int, copies: Sequence[int]) -> list[int]:
    """Return the last node of each stage but the last, where running peaks reach their shares: Algorithm 2 as printed.

    `copies` generalises PipeDream's ℓ : (ℓ − 1) : … : 1 to other schedules. `total_bytes` is M_G, the model's bytes
    with one copy (`one_copy_bytes`). The paper's input list calls M_G "GPU peak memory limit", but by line 5 the
    stages' shares M_x add up to it: with a GPU's limit the first stages of a smaller model would take all nodes.
    """
    ends = list[int]()
    stage, current, peak = 0, 0, 0  # 1
    total = sum(Fraction(copies[0], stage_copies) for stage_copies in copies)  # 2–4
    first_share = share = Fraction(total_bytes) / total  # 5
    for number, node in enumerate(nodes):  # 6
        current += node.activation_bytes + node.parameter_bytes + node.optimizer_bytes  # 7
        peak = max(current, peak)  # 8
        current -= node.released_bytes  # 9
        if peak >= share:  # 10
            ends.append(number)  # 11
            stage += 1
            if stage == len(copies) - 1:  # 14: the last stage takes the rest
                break  # 15
            share = Fraction(copies[0], copies[stage]) * first_share  # 12
            current = peak = 0  # 13
    return ends


def one_copy_bytes(nodes: Sequence[Node]) -> int:
    """Return M_G, the model's bytes with one copy of everything: the running peak of Algorithm 2 over all nodes."""
    current = peak = 0
    for node in nodes:
        current += node.activation_bytes + node.parameter_bytes + node.optimizer_bytes
        peak = max(peak, current)
        current -= node.released_bytes
    return peak


def printed_cuts(problem: Problem) -> tuple[int, ...] | None:
    """Return all boundaries, at the nearest allowed cuts; None: it leaves stages empty.

    It adds up running peaks of stages, whose sum need not be the model's, so nodes may last for fewer stages.
    """
    costs, copies = problem.costs, problem.copies
    nodes = costs.profile.nodes
    starts = np.array(running_peak_cuts(nodes, one_copy_bytes(nodes), copies.own)) + 1
    cuts = (0, *(int(np.abs(costs.starts - start).argmin()) for start in starts), costs.last)
    full = len(cuts) == copies.positions + 1 and all(before < after for before, after in pairwise(cuts))
    return cuts if full else None
