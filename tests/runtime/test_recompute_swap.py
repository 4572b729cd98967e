"""Storages that are swapped: memory that a copy still reads is kept, and two parts of a stage may share one."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from evenpipe.runtime.connections import Connections
from evenpipe.runtime.executor import Executor
from evenpipe.runtime.host_memory import Passage
from evenpipe.runtime.memory import MemoryCounter
from evenpipe.runtime.recompute_swap import PLAIN_CALLER, Keeper, Keeping, NodeCaller, SwappedStorage
from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.schedule import Size, Unit, build


class NotedLink:
    """Copies at once, and notes which copies are waited for, as long as `saved` has what they read or write."""

    def __init__(self) -> None:
        self.waited: list[str] = []
        self.saved: SwappedStorage

    def out(self, memory: torch.Tensor) -> Passage:
        return self._started("out", memory, memory.clone())

    def back(self, host: torch.Tensor, memory: torch.Tensor) -> Passage:
        return self._started("back", memory, memory.copy_(host))

    def _started(self, way: str, memory: torch.Tensor, target: torch.Tensor) -> Passage:
        address = memory.data_ptr()

        def wait() -> None:
            assert self.saved.storage is not None
            assert self.saved.storage.data_ptr() == address
            self.waited.append(way)

        return Passage(target, wait)


@pytest.mark.parametrize(
    ("calls", "waited"),
    [
        (("leave", "recall"), ["out"]),  # which a backward that comes early asks back
        (("leave",), ["out"]),
        (("leave", "gone", "recall"), ["out", "back"]),
        ((), []),
    ],
)
def test_what_is_still_read_or_written_is_waited_for(calls, waited):
    link = NotedLink()
    link.saved = saved = SwappedStorage(torch.ones(4), link, 0, {}, MemoryCounter())
    for call in calls:
        getattr(saved, call)()
    saved.drop()
    assert saved.storage is None
    assert link.waited == waited


ROWS, WIDTH = 16, 8
NBYTES = 4 * ROWS * WIDTH
HOST = torch.device("cpu")
#: Each part's result, which it saves, is swapped; and what the second one takes, which it saves too, or not.
MADE = {1: ((1, NBYTES),)}
GIVES = Keeping(swapped={1}, made=MADE, out={1: (1,)}, gone={1: (1,)}, early=(1,))
GIVES_LATE = Keeping(swapped={1}, made=MADE, out={1: (1,)}, back={1: (1,)})
TAKES = Keeping(swapped={0, 1}, made=MADE, out={1: (0, 1)}, gone={1: (0, 1)}, early=(0, 1))
KEEPS = Keeping(swapped={1}, made=MADE, out={1: (1,)}, early=(1,))


class Half(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.keep: NodeCaller = PLAIN_CALLER

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.linear(self.keep.given(0, value))
        result: Tensor = self.keep(1, torch.ops.aten.tanh.default, hidden)
        return result


class Halves(ModuleStage):
    keeper: Keeper | None = None
    keeping: tuple[Keeping, ...] = ()

    def compute(self, unit: Unit, inputs: list[Tensor] | None) -> Tensor:
        half = self.chunks[unit.chunk]
        if self.keeper is None:
            return super().compute(unit, inputs)  # type: ignore[no-any-return]
        with self.keeper.forward(unit, self.keeping[unit.chunk], lambda _: contextlib.nullcontext()) as half.keep:
            result = super().compute(unit, inputs)
        half.keep = PLAIN_CALLER
        return result  # type: ignore[no-any-return]


def gradients(*keeping: Keeping) -> list[Tensor]:
    halves = [Half(0), Half(1)]
    random = torch.Generator().manual_seed(2)
    inputs = [torch.randn(ROWS, WIDTH, generator=random) for _ in range(4)]
    stage = Halves(halves, Edges.alike(torch.empty(ROWS, WIDTH), 2), inputs.__getitem__, lambda _, out: out.sum(), 1)
    executor = Executor(0, Connections({}, {}), HOST, [one for half in halves for one in half.parameters()])
    if keeping:
        stage.keeping = keeping
        executor.keeper = stage.keeper = Keeper(executor.store, HOST)
    executor.run(build("v-half", Size(1, 4), swaps=(0, 1) if keeping else ()), stage)
    executor.store.assert_empty()
    return [one.grad for half in halves for one in half.parameters()]


@pytest.mark.parametrize("gives", [GIVES, GIVES_LATE])
@pytest.mark.parametrize("takes", [TAKES, KEEPS])
def test_what_one_hands_the_other_may_be_swapped_by_both(gives: Keeping, takes: Keeping) -> None:
    for plain, swapped in zip(gradients(), gradients(gives, takes), strict=True):
        assert torch.equal(plain, swapped)
