"""Many costs at once are the simulator, row by row and to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from evenpipe.schedule import Size, build
from evenpipe.simulate import Costs, ManyCosts, Wire, simulate

CASES = [
    ("1f1b", Size(4, 9), False),
    ("1f1b", Size(4, 8), True),
    ("gpipe", Size(3, 5), False),
    ("kfkb", Size(4, 8, group_size=2), False),
    ("2bw", Size(4, 4, batches=3), False),
    ("interleaved", Size(4, 8, 2), False),
    ("v-half", Size(4, 8, 2), False),
    ("zb-h1", Size(4, 8), False),
]


@pytest.mark.parametrize(("name", "size", "bpipe"), CASES, ids=lambda case: str(case))
def test_each_row_is_a_simulation(name: str, size: Size, bpipe: bool) -> None:
    program = build(name, size, bpipe=bpipe)
    draw, rows, links = np.random.default_rng(0), 5, program.wiring.links
    forward, backward = draw.random((2, rows, size.stages))
    transmit, latency = draw.random((2, rows, len(links))) * draw.choice([0.0, 0.1, 3.0], (rows, 1))
    found = ManyCosts(program).makespans(forward, backward, transmit, latency)
    for row, ms in enumerate(found.tolist()):
        wires = {link: Wire(latency[row, number], transmit[row, number]) for number, link in enumerate(links)}
        costs = Costs(tuple(forward[row].tolist()), tuple(backward[row].tolist()), links=wires)
        assert ms == simulate(program, costs).makespan_ms


def test_more_rows_than_are_taken_at_once() -> None:
    program = build("1f1b", Size(2, 2))
    forward = np.linspace(0.0, 1.0, 10_000).repeat(2).reshape(-1, 2)
    wires = np.zeros((2, len(forward), len(program.wiring.links)))
    found = ManyCosts(program).makespans(forward, 2 * forward, *wires)
    assert found == pytest.approx(9 * forward[:, 0])  # two micro-batches and one stage's bubble, of 3 units each
