"""All ranks together: measure the links, have rank 0 decide, and take its decision over."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from evenpipe.planner.grouped import Candidate
from evenpipe.planner.memory import Measured
from evenpipe.runtime.connections import Connections
from evenpipe.schedule import Link, links, loop
from evenpipe.tuner.links import Burst, measure_links
from evenpipe.tuner.tuner import Retune, Tuner

__all__ = ["fits_on_all", "highest_of_all", "of_all_stages", "retune"]

#: Longer ones take no less for each message.
_LONGEST_BURST: Final = 8
_ROUNDS: Final = 5
#: What measuring may take, but for its first round: half a per cent of an hour.
_LONGEST_S: Final = 18.0


def retune(
    tuner: Tuner,
    connections: Connections,
    stage: int,
    stages: int,
    message_bytes: Mapping[int, int],
    iteration: int,
    device: torch.device,
) -> Retune:
    """Before `iteration`, with nothing under way: every rank calls it, and from then on uses what is returned.

    `message_bytes` are those of a message between stages, by micro-batch size. Where several pipelines run side by
    side, the slowest says what a message takes.
    """
    candidates = tuner.candidates
    burst_of = {one: Burst(min(one.k, _LONGEST_BURST), message_bytes[one.b]) for one in candidates}
    bursts = sorted(set(burst_of.values()))
    tested = links(loop(stages))
    nothing = (0.0,) * len(bursts)
    samples_ms: dict[tuple[Candidate, Link], list[float]] = defaultdict(list)
    began = time.monotonic()
    for rounds in range(1, _ROUNDS + 1):
        measured = measure_links(connections, stage, stages, bursts, device)
        mine = [[measured.get(link, nothing)[number] for link in tested] for number in range(len(bursts))]
        taken_ms = dict(zip(bursts, highest_of_all(mine, device), strict=True))
        for candidate in candidates:
            for link, message_ms in zip(tested, taken_ms[burst_of[candidate]], strict=True):
                samples_ms[candidate, link].append(message_ms)
        [spent_s] = highest_of_all([time.monotonic() - began], device)
        if spent_s / rounds * (rounds + 1) > _LONGEST_S:
            break
    for (candidate, link), of_all_rounds in samples_ms.items():
        tuner.observe(candidate, link, of_all_rounds)
    decision = torch.zeros(len(candidates) + 2, dtype=torch.float64)
    if dist.get_rank() == 0:
        chosen, estimates, following = tuner.decide(iteration)
        decision = torch.tensor([candidates.index(chosen), following, *estimates], dtype=torch.float64)
    decision = decision.to(device)
    dist.broadcast(decision, 0)
    index, following, *estimates = decision.tolist()
    return tuner.adopt(iteration, candidates[int(index)], estimates, int(following))


def of_all_stages(mine: Measured, stage: int, stages: int, device: torch.device) -> tuple[Measured, ...]:
    """Every stage's: of its replicas and shards the highest numbers, of which this process, of `stage`, has `mine`."""
    table = [mine if at == stage else [0.0] * len(mine) for at in range(stages)]
    return tuple(Measured(*numbers) for numbers in highest_of_all(table, device))


def fits_on_all(nbytes: int, limit_bytes: int, device: torch.device) -> bool:
    """Whether no rank's `nbytes` are more than its limit, so that all go on, or none."""
    return bool(highest_of_all([nbytes - limit_bytes], device)[0] <= 0)


def highest_of_all(table: Sequence[Any], device: torch.device) -> Any:
    """Of each number in a table of any shape the highest that a rank has; doubles, so that bytes are exact."""
    numbers = torch.tensor(table, dtype=torch.float64, device=device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return numbers.tolist()
