"""Six gloo processes that train plain modules in streams without flushes, and write down what came of it.

Argument: a folder (rank-<rank>.json out). An optimizer changes weights in place while micro-batches are in flight.
"""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from executor_cases import ROWS, WIDTH, chunk_module, loss, sample
from ranks import report

from evenpipe.runtime.connections import connect
from evenpipe.runtime.exchange import Exchange
from evenpipe.runtime.executor import Executor, Observer
from evenpipe.runtime.recompute_swap import Keeper
from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.runtime.weight_versions import WeightVersions
from evenpipe.schedule import Action, Stream, Unit, batch_of, find, links, loop, required_version

WORLD = 6
BATCHES = 7


class Case(NamedTuple):
    """A pipeline; the stream is broken off after each batch in `breaks`."""

    stages: int
    micro_batches: int
    bpipe: bool = False
    breaks: tuple[int, ...] = ()
    update_early: bool = False


CASES = {
    "p=2 m=2": Case(2, 2),
    "p=2 m=3 early": Case(2, 3, update_early=True),
    "p=4 m=4": Case(4, 4),
    "p=4 m=4 bpipe": Case(4, 4, bpipe=True),
    "p=4 m=5 bpipe, broken off": Case(4, 5, bpipe=True, breaks=(0, 1, 4)),
    "p=5 m=5 bpipe": Case(5, 5, bpipe=True),
    "p=6 m=7 bpipe, broken off": Case(6, 7, bpipe=True, breaks=(2, 5)),
}


class Paired(Observer):
    """Whatever starts ends, once; KeyError otherwise."""

    def __init__(self) -> None:
        self.open: dict[Action, None] = {}

    def started(self, action: Action) -> None:
        self.open[action] = None

    def ended(self, action: Action) -> None:
        del self.open[action]


class SteppedModule(ModuleStage):
    """A stage whose module is trained by Adam under the rule of 2BW."""

    keeper: Keeper | None = None

    def __init__(self, place: int, stages: int, micro_batches: int) -> None:
        self.module = self.part(place)
        self.versions = WeightVersions(self.module.parameters())
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=0.01, foreach=False)
        self.held: list[list[torch.Tensor]] = []
        self.micro_batches = micro_batches
        self.first = 0  # the batch with which the stream begins
        edges, loss_chunk = Edges.alike(torch.empty(ROWS, WIDTH)), 0 if place == stages - 1 else None
        super().__init__([self.module], edges, self._sample, self._loss, loss_chunk)

    def part(self, place: int) -> torch.nn.Module:
        """The piece of the model at `place`."""
        return chunk_module(place)

    def _number(self, micro_batch: int) -> int:
        return self.first * self.micro_batches + micro_batch

    def _sample(self, micro_batch: int) -> torch.Tensor:
        return sample(self._number(micro_batch))

    def _loss(self, micro_batch: int, output: torch.Tensor) -> torch.Tensor:
        return loss(self._number(micro_batch), output)

    def use(self, unit: Unit) -> None:
        self.versions.use(required_version(self.first + batch_of(unit.micro_batch, self.micro_batches)))

    def gather(self) -> None:
        """No step depends on another stage."""

    def submit(self) -> None:
        """The batch's gradients make way for the next one's."""
        self.held.append([parameter.grad for parameter in self.module.parameters()])
        for parameter in self.module.parameters():
            parameter.grad = None

    def update(self) -> None:
        gathered = [parameter.grad for parameter in self.module.parameters()]
        for parameter, gradient in zip(self.module.parameters(), self.held.pop(0), strict=True):
            parameter.grad = gradient
        with self.versions.writing():
            self.optimizer.step()
        for parameter, gradient in zip(self.module.parameters(), gathered, strict=True):
            parameter.grad = gradient

    def forget(self, next_batch: int) -> None:
        self._inputs.clear()
        self._outputs.clear()
        self.first = next_batch


def train(rank: int, case: Case, kind: type[SteppedModule] = SteppedModule, swaps: bool = False) -> dict[str, object]:
    """This stage's losses, weights in the end, and peaks."""
    stage = kind(rank, case.stages, case.micro_batches)
    connections = connect(range(case.stages), links(loop(case.stages), case.bpipe), "gloo", torch.device("cpu"))
    paired = Paired()
    executor = Executor(rank, connections, torch.device("cpu"), stage.module.parameters(), paired)
    if swaps:
        executor.keeper = stage.keeper = Keeper(executor.store, torch.device("cpu"))
    swapping = range(case.stages) if swaps else ()
    steps_of = Stream(find("2bw"), case.stages, case.micro_batches, case.bpipe, swaps=swapping)
    losses, called = [], 0
    for batch in range(BATCHES):
        with executor.stretch(steps_of.program, stage, stage) as take:
            for step in steps_of.call(rank, called, case.update_early):
                take(step)
        stage.submit()
        first = called * case.micro_batches
        called += 1
        if stage.losses:
            losses.append([stage.losses[first + i].item().hex() for i in range(case.micro_batches)])
        if batch in (*case.breaks, BATCHES - 1):
            executor.break_off(steps_of.owed(rank, called - 1))
            stage.update()
            stage.forget(batch + 1)
            assert not paired.open, "nothing is under way"
            executor.store.assert_empty()
            called = 0
    stage.versions.use(stage.versions.latest)
    counted = executor.counter
    connections.close()
    weights = [value.hex() for parameter in stage.module.parameters() for value in parameter.flatten().tolist()]
    return {
        "losses": losses,
        "weights": weights,
        "peak_units": counted.peak_units,
        "left": [counted.own_bytes, counted.accepted_bytes, counted.own_units, counted.accepted_units],
        "versions": stage.versions.peak,
    }


def exchanges(rank: int) -> list[list[list[float]]]:
    """What comes of two exchanges that the last rank starts long after the first has asked nothing of it."""
    exchange = Exchange(dist.group.WORLD, 2, torch.device("cpu"))
    rows = []
    for turn in range(2):
        exchange.start([rank, 10.0 * turn])
        rows.append(exchange.finish())
    return rows


def outcomes(rank: int, folder: Path) -> dict[str, object]:
    found = {name: train(rank, case) for name, case in CASES.items() if rank < case.stages}
    return {"cases": found, "exchanges": exchanges(rank)}


if __name__ == "__main__":
    report(WORLD, outcomes)
