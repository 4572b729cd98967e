"""All ranks together: measure the links (Ada-Grouper §5.2), have rank 0 decide, and take its decision over."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from statistics import median
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from evenpipe.runtime.channel import Transfer
from evenpipe.runtime.connections import Connections
from evenpipe.runtime.resources import highest_of_all
from evenpipe.runtime.timing import sending_gbps
from evenpipe.schedule import Link, ScheduleError, links, loop
from evenpipe.tuner.group_memory import Measured
from evenpipe.tuner.grouped import Candidate
from evenpipe.tuner.tuner import Retune, Tuner

__all__ = ["Burst", "Ends", "decided_by_rank_0", "fits_on_all", "measure_links", "of_all_stages", "retune"]

#: Longer ones take no less for each message.
_LONGEST_BURST: Final = 8
_ROUNDS: Final = 5
#: What measuring may take, but for its first round: half a per cent of an hour.
_LONGEST_S: Final = 18.0


class Ends(NamedTuple):
    """One stage's ends of all links."""

    connections: Connections
    stage: int
    stages: int
    device: torch.device


def retune(
    tuner: Tuner, ends: Ends, message_bytes: Mapping[int, int], saved_bytes: Mapping[int, Sequence[int]], iteration: int
) -> Retune:
    """Before `iteration`, with nothing under way: every rank calls it, and from then on uses what is returned.

    By micro-batch size, `message_bytes` are those of a message between stages, and with BPipe `saved_bytes` those that
    each stage saves for a micro-batch, which an eviction moves. Where several pipelines run side by side, the slowest
    says what a message takes.
    """
    candidates, device = tuner.candidates, ends.device
    samples_ms: dict[tuple[Candidate, Link], list[float]] = defaultdict(list)
    began = time.monotonic()
    for rounds in range(1, _ROUNDS + 1):
        found = _messages_ms(candidates, message_bytes, ends)
        if tuner.schedule.programs.bpipe:
            found |= _evictions_ms(candidates, saved_bytes, ends)
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
    candidates: Sequence[Candidate], message_bytes: Mapping[int, int], ends: Ends
) -> dict[tuple[Candidate, Link], float]:
    """Return what a message of each candidate takes between neighbours."""
    burst_of = {one: Burst(min(one.k, _LONGEST_BURST), message_bytes[one.b]) for one in candidates}
    bursts = sorted(set(burst_of.values()))
    tested = links(loop(ends.stages))
    nothing = (0.0,) * len(bursts)
    measured = measure_links(ends, bursts)
    mine = [[measured.get(link, nothing)[number] for link in tested] for number in range(len(bursts))]
    taken_ms = dict(zip(bursts, highest_of_all(mine, ends.device), strict=True))
    return {(one, link): ms for one in candidates for link, ms in zip(tested, taken_ms[burst_of[one]], strict=True)}


def _evictions_ms(
    candidates: Sequence[Candidate], saved_bytes: Mapping[int, Sequence[int]], ends: Ends
) -> dict[tuple[Candidate, Link], float]:
    """Return what an eviction and a load of each candidate take between partners."""
    pairs = links(loop(ends.stages), pairs=True)[len(links(loop(ends.stages))) :]
    gbps = sending_gbps(ends.connections, ends.stage, ends.device)
    mine = [1e-6 / gbps if gbps is not None and link.source == ends.stage else 0.0 for link in pairs]
    byte_ms = dict(zip(pairs, highest_of_all(mine, ends.device), strict=True))
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
    """Return whether no rank's `nbytes` are more than its limit, so that all go on, or none."""
    return bool(highest_of_all([nbytes - limit_bytes], device)[0] <= 0)


_ROUND_TRIPS: Final = 5


class Burst(NamedTuple):
    """Messages sent back to back, as a group of micro-batches sends them."""

    messages: int
    nbytes: int


def measure_links(ends: Ends, bursts: Sequence[Burst]) -> dict[Link, tuple[float, ...]]:
    """For each link between neighbours on which the stage receives, per burst: milliseconds of a message.

    All stages of a pipeline call it, between batches; nothing is under way when it returns. Receives are posted ahead,
    as in a batch, so that a message's time is its share of the burst's, end to end. All bursts follow each other, on
    all links of one direction at once, then of the other, as a pipeline uses them. Needs memory for two messages of the
    largest size.
    """
    probe = _Probe(ends, max(burst.nbytes for burst in bursts))
    latency_ms = probe.latencies_ms()
    return {
        link: tuple((latency_ms[link] + ms) / burst.messages for burst, ms in zip(bursts, taken_ms, strict=True))
        for link, taken_ms in (probe.round_ms(True, bursts) | probe.round_ms(False, bursts)).items()
    }


class _Probe:
    """One stage's part.

    Times are taken where messages arrive: the clocks of two nodes cannot be compared, and an answer would share its way
    back with whatever else goes there. A burst takes from the end of what came before it on the link, which is a
    message that goes ahead of all bursts, until its own end; and the link's latency, which is half of what a byte takes
    there and back.
    """

    def __init__(self, ends: Ends, most_bytes: int) -> None:
        connections, stage, stages, device = ends
        self._channels = connections.channels
        self._stage = stage
        self._device = device
        before, behind = stage - 1, stage + 1
        #: This stage's ends, None where the line of stages ends: with the stage before it, with the one behind it.
        self._from_before = Link("forward", before, stage) if stage > 0 else None
        self._to_before = Link("backward", stage, before) if stage > 0 else None
        self._from_behind = Link("backward", behind, stage) if behind < stages else None
        self._to_behind = Link("forward", stage, behind) if behind < stages else None
        # Ones: pages of zeros would all be the same one, in the processor's cache. Nobody reads what arrives, so that
        # all messages may have the same memory.
        self._sent = torch.ones(most_bytes, dtype=torch.uint8, device=device)
        self._received = torch.ones_like(self._sent)

    def latencies_ms(self) -> dict[Link, float]:
        """Return the latency of a byte, on the links on which this stage receives.

        Every other pair of stages is measured first, then those between.
        """
        found = {}
        for first in (0, 1):
            leads = self._stage % 2 == first
            into, out = (self._from_behind, self._to_behind) if leads else (self._from_before, self._to_before)
            if into is not None and out is not None:
                trips = [self._round_trip_ms(into, out, leads) for _ in range(1 + _ROUND_TRIPS)]
                # The first one waits for the other stage too.
                found[into] = median(trips[1:]) / 2
        return found

    def round_ms(self, forwards: bool, bursts: Sequence[Burst]) -> dict[Link, list[float]]:
        """Have all links of one direction carry `bursts`; ms of each where it arrives here."""
        into, out = (self._from_before, self._to_behind) if forwards else (self._from_behind, self._to_before)
        # All stages set out together: a token passes to the last one and comes back.
        self._wait(self._receive(self._from_before))
        self._wait(self._send(self._to_behind))
        self._wait(self._receive(self._from_behind))
        returned = self._send(self._to_before)
        arriving, leaving = [], []
        first = min(burst.nbytes for burst in bursts)
        for nbytes in (first, *(burst.nbytes for burst in bursts for _ in range(burst.messages))):
            arriving.append(self._receive(into, nbytes))
            leaving.append(self._send(out, nbytes))
        messages = iter(arriving)
        self._wait(next(messages))
        ends = [time.perf_counter()]
        for burst in bursts:
            self._wait(*islice(messages, burst.messages))
            ends.append(time.perf_counter())
        self._wait(returned, *leaving)
        return {} if into is None else {into: [(end - start) * 1e3 for start, end in pairwise(ends)]}

    def _round_trip_ms(self, into: Link, out: Link, leads: bool) -> float:
        start = time.perf_counter()
        if leads:
            answer = self._receive(into)
            self._wait(self._send(out), answer)
        else:
            self._wait(self._receive(into))
            self._wait(self._send(out))
        return (time.perf_counter() - start) * 1e3

    def _send(self, link: Link | None, nbytes: int = 1) -> Transfer | None:
        return None if link is None else self._channels[link].send([self._sent[:nbytes]])

    def _receive(self, link: Link | None, nbytes: int = 1) -> Transfer | None:
        return None if link is None else self._channels[link].receive([self._received[:nbytes]])

    def _wait(self, *transfers: Transfer | None) -> None:
        """Have the host wait, which on CUDA would only have told the device to."""
        for transfer in transfers:
            if transfer is not None:
                transfer.wait()
        if self._device.type == "cuda":
            # Not the whole device: other transfers may be waiting for this stage.
            torch.cuda.current_stream(self._device).synchronize()


def decided_by_rank_0(decide: Callable[[], tuple[Any, str]]) -> tuple[Any, str]:
    """Return what `decide` returns on rank 0, where alone it is called: plain data, and what is said of it.

    Where it fails, rank 0 raises its error, and the others ScheduleError with the same line: none waits for ever.
    """
    answer: list[Any] = [None, "", False]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer = [*decide(), True]
        except Exception as error:
            answer, failure = [None, str(error), False], error
    dist.broadcast_object_list(answer, src=0)
    decision, said, is_decided = answer
    if failure is not None:
        raise failure
    if not is_decided:
        raise ScheduleError(said)
    return decision, said
