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
from evenpipe.runtime.timing import sending_gbps
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
    saved_bytes: Mapping[int, Sequence[int]],
    iteration: int,
    device: torch.device,
) -> Retune:
    """Before `iteration`, with nothing under way: every rank calls it, and from then on uses what is returned.

    By micro-batch size, `message_bytes` are those of a message between stages, and with BPipe `saved_bytes` those that
    each stage saves for a micro-batch, which an eviction moves. Where several pipelines run side by side, the slowest
    says what a message takes.
    """
    candidates, where = tuner.candidates, (connections, stage, stages, device)
    samples_ms: dict[tuple[Candidate, Link], list[float]] = defaultdict(list)
    began = time.monotonic()
    for rounds in range(1, _ROUNDS + 1):
        found = _messages_ms(candidates, message_bytes, *where)
        if tuner.schedule.programs.bpipe:
            found |= _evictions_ms(candidates, saved_bytes, *where)
        for key, taken_ms in found.items():
            samples_ms[key].append(taken_ms)
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


def _messages_ms(
    candidates: Sequence[Candidate],
    message_bytes: Mapping[int, int],
    connections: Connections,
    stage: int,
    stages: int,
    device: torch.device,
) -> dict[tuple[Candidate, Link], float]:
    """What a message of each candidate takes between neighbours."""
    burst_of = {one: Burst(min(one.k, _LONGEST_BURST), message_bytes[one.b]) for one in candidates}
    bursts = sorted(set(burst_of.values()))
    tested = links(loop(stages))
    nothing = (0.0,) * len(bursts)
    measured = measure_links(connections, stage, stages, bursts, device)
    mine = [[measured.get(link, nothing)[number] for link in tested] for number in range(len(bursts))]
    taken_ms = dict(zip(bursts, highest_of_all(mine, device), strict=True))
    return {(one, link): ms for one in candidates for link, ms in zip(tested, taken_ms[burst_of[one]], strict=True)}


def _evictions_ms(
    candidates: Sequence[Candidate],
    saved_bytes: Mapping[int, Sequence[int]],
    connections: Connections,
    stage: int,
    stages: int,
    device: torch.device,
) -> dict[tuple[Candidate, Link], float]:
    """What an eviction and a load of each candidate take between partners."""
    pairs = links(loop(stages), pairs=True)[len(links(loop(stages))) :]
    gbps = sending_gbps(connections, stage, device)
    mine = [1e-6 / gbps if gbps is not None and link.source == stage else 0.0 for link in pairs]
    byte_ms = dict(zip(pairs, highest_of_all(mine, device), strict=True))
    return {
        (one, link): ms * saved_bytes[one.b][min(link.source, link.target)]
        for one in candidates
        for link, ms in byte_ms.items()
    }


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
