"""Forwards alone, as an evaluation carries them out, end on every kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from evenpipe.runtime.forward_only import forward_only
from evenpipe.schedule import FORWARD, Action, Link, Message, Schedule, Size, Unit, build
from evenpipe.simulate.costs import Costs
from evenpipe.simulate.device import PLAIN, Call, Device, Environment

ENVIRONMENTS = {
    "plain": PLAIN,
    "one queue": Environment(one_queue=True),
    "synchronised": Environment(synchronised="timers"),
    "one queue, synchronised": Environment(one_queue=True, synchronised="timers"),
    "CUDA_LAUNCH_BLOCKING": Environment(synchronised="everything"),
}


class Told:
    """A link's end that notes what it is asked for."""

    def __init__(self, link: Link, calls: list[Call]) -> None:
        self._link, self._calls, self._number = link, calls, 0

    def _message(self, kind: Any) -> Any:
        message = Message(self._link, self._number, 0)
        self._number += 1
        self._calls.append(Call(kind, message))
        return SimpleNamespace(wait=lambda: self._calls.append(Call("wait", message)))

    def send(self, tensors: Sequence[Any]) -> Any:
        return self._message("send")

    def receive(self, buffers: Sequence[Any]) -> Any:
        return self._message("receive")


def calls_of(schedule: Schedule, stage: int) -> list[Call]:
    calls: list[Call] = []
    links = {Link("forward", s, t) for s in range(schedule.stages) for t in range(schedule.stages)}

    def forward(unit: Unit, inputs: Any) -> list[Any]:
        calls.append(Call("compute", Action(FORWARD, unit.micro_batch, unit.chunk)))
        return []

    part: Any = SimpleNamespace(receive_buffers=lambda kind, unit: [], forward=forward)
    channels: Any = {link: Told(link, calls) for link in links}
    resources: Any = SimpleNamespace(connections=SimpleNamespace(channels=channels), layouts={}, stage_index=stage)
    forward_only(resources, schedule.places, schedule.micro_batches, part)
    return calls


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", None), ("interleaved", 2), ("interleaved", 3), ("v-half", 2)], ids=str
)
def test_no_stage_waits_for_ever(name: str, chunks: int | None, environment: str) -> None:
    for stages in (2, 3, 4, 5):
        size = Size(stages, 2 * stages) if chunks is None else Size(stages, 2 * stages, chunks)
        schedule = build(name, size).schedule
        rows = [calls_of(schedule, stage) for stage in range(stages)]
        assert sum(call.kind == "compute" for row in rows for call in row) == 2 * stages**2 * (chunks or 1)
        costs = Costs((1.0,) * stages, (2.0,) * stages)
        assert Device(rows, costs, chunks or 1, ENVIRONMENTS[environment]).stuck == []
