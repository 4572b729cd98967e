"""Carry a lowered schedule out on the clock: in-order stages, FIFO links, asynchronous transfers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evenpipe.schedule import Disagreement, PerStage, Program, Wiring, without_cycle_collector
from evenpipe.simulate.costs import Costs, SimulationError
from evenpipe.simulate.network import Network
from evenpipe.simulate.result import Simulation, StageResult
from evenpipe.simulate.stage import StageClock

__all__ = ["simulate"]


@without_cycle_collector()
def simulate(program: Program, costs: Costs, unit_bytes: Sequence[Sequence[int]] | None = None) -> Simulation:
    """Run ``program`` on the clock; time and memory are linear in the number of actions.

    A stage issues a step's receives when its previous action has ended, waits until the messages that the step needs
    are complete, then acts: a forward or backward takes the stage's time, a transfer only starts, an update is free.
    ``unit_bytes[s][c]`` are the bytes saved for one micro-batch by chunk c of stage s (an accepted unit weighs what it
    weighs at its evictor); without it the memory curve counts units only.

    Raises SimulationError when the costs do not fit the program, when the two ends of a link disagree, and when stages
    wait for one another for ever (naming the action each is stuck at).
    """
    stages, chunks = program.schedule.stages, program.schedule.chunks
    if len(costs.forward_ms) != stages:
        raise SimulationError(f"the costs have times for {len(costs.forward_ms)} stages, the schedule has {stages}")
    if unit_bytes is not None and [len(sizes) for sizes in unit_bytes] != [chunks] * stages:
        raise SimulationError(f"unit_bytes: give {chunks} sizes (one a chunk) for each of {stages} stages")
    wiring = program.wiring
    if wiring.disagreement is not None:
        raise SimulationError(_ends_differ(wiring, wiring.disagreement))
    network = Network([costs.wire(link) for link in wiring.links], wiring.link_of)
    clocks = [StageClock(program, stage, costs, network, unit_bytes) for stage in range(stages)]
    stuck = _run(clocks, network, wiring)
    if stuck:
        raise SimulationError(f"deadlock, stages wait for one another: {', '.join(stuck)}")
    makespan_ms = max((clock.now_ms for clock in clocks), default=0.0)
    if not math.isfinite(makespan_ms):
        raise SimulationError("the times add up to more than a number can hold: give shorter ones")
    results = tuple(
        StageResult(
            busy_ms=clock.busy_ms,
            idle_ms=max(0.0, makespan_ms - clock.busy_ms),  # sums of the same times may round differently
            peak_live=int(clock.memory.live.max(initial=0)),
            peak_bytes=max(clock.memory.bytes or (), default=0),
            memory=clock.memory,
        )
        for clock in clocks
    )
    bubble_fraction = sum(result.idle_ms for result in results) / (makespan_ms * stages) if makespan_ms else 0.0
    return Simulation(makespan_ms, bubble_fraction, results, PerStage(stages, lambda stage: clocks[stage].spans()))


def _run(clocks: Sequence[StageClock], network: Network, wiring: Wiring) -> list[str]:
    """Let every stage walk as far as it can, and on again when what it waits for has met.

    No event queue: the times of a message are final once known, so the order of the walk does not matter. Returns where
    stages are stuck for ever.
    """
    walks = [clock.walk() for clock in clocks]
    network.woken.extend(range(len(clocks)))
    while network.woken:
        stage = network.woken.popleft()
        wanted = next(walks[stage], None)
        if wanted is not None:
            network.waiting.setdefault(wanted, []).append(stage)
    return [
        f"stage {clocks[stage].stage} at {clocks[stage].action} waits for {wiring.links[wiring.link_of[message]]}"
        for message, stages in network.waiting.items()
        for stage in stages
    ]


def _ends_differ(wiring: Wiring, found: Disagreement) -> str:
    if min(found.sends, found.takes) < 0:
        known = wiring.unit(max(found.sends, found.takes), sent=found.takes < 0)
        return f"link {found.link}: unit {known[0]}.{known[1]} has only one end"
    sent, expected = wiring.unit(found.sends, sent=True), wiring.unit(found.takes, sent=False)
    return f"link {found.link}: unit {sent[0]}.{sent[1]} is sent where {expected[0]}.{expected[1]} is expected"
