"""Pair-adjacent placement: the paper's figures, what holds for every size, and the groups that Megatron then builds."""

import json
import re
import subprocess
import sys
from math import gcd
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.runtime.placement import Coordinate, Placement, place


def drawn(placement: Placement) -> str:
    """A line a node; a GPU is its stage, with .data and .tensor rank where there are several."""
    cells = [
        f"{c.pp}" + (f".{c.dp}" if placement.d > 1 else "") + (f".{c.tp}" if placement.t > 1 else "")
        for c in placement.slots
    ]
    nodes = [cells[i : i + placement.gpus_per_node] for i in range(0, len(cells), placement.gpus_per_node)]
    return "\n".join(" ".join(node) for node in nodes)


def lines(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


DRAWINGS = {
    "figure 5(b): 16 stages on two nodes of 8": (
        (16, 1, 1, 8),
        """
        0 15 1 14 2 13 3 12
        4 11 5 10 6  9 7  8
        """,
    ),
    "figure 6: 4 stages, 2-way tensor, 2-way data (stage.data.tensor)": (
        (4, 2, 2, 8),
        """
        0.0.0 0.0.1  3.0.0 3.0.1  1.0.0 1.0.1  2.0.0 2.0.1
        0.1.0 0.1.1  3.1.0 3.1.1  1.1.0 1.1.1  2.1.0 2.1.1
        """,
    ),
    "an odd p's middle stages fill the places that pairs leave": (
        (5, 1, 4, 4),
        """
        0.0 4.0 1.0 3.0
        2.0 0.1 4.1 2.1
        1.1 3.1 0.2 4.2
        1.2 3.2 2.2 2.3
        0.3 4.3 1.3 3.3
        """,
    ),
    "an odd node's last place goes to a middle stage rather than half a pair": (
        (3, 1, 3, 3),
        """
        0.0 2.0 1.0
        0.1 2.1 1.1
        0.2 2.2 1.2
        """,
    ),
    "an odd node without middle stages cuts one pair in two nodes": (
        (6, 1, 1, 3),
        """
        0 5 1
        4 2 3
        """,
    ),
    "nodes of one tensor group: partners on neighbouring nodes": (
        (3, 2, 1, 2),
        """
        0.0 0.1
        2.0 2.1
        1.0 1.1
        """,
    ),
    "a node that is not filled": ((3, 1, 1, 8), "0 2 1"),
}


@pytest.mark.parametrize("case", DRAWINGS)
def test_drawing(case: str) -> None:
    sizes, drawing = DRAWINGS[case]
    assert drawn(place(*sizes)) == lines(drawing)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """p, t, d and GPUs per node that fill whole nodes or fit one."""
    p, t, groups_per_node = draw(st.integers(1, 17)), draw(st.integers(1, 8)), draw(st.integers(1, 16))
    filling = groups_per_node // gcd(p, groups_per_node)
    fitting = groups_per_node // p
    multiples = st.integers(1, 4).map(lambda n: n * filling)
    d = draw(st.one_of(multiples, st.integers(1, fitting)) if fitting else multiples)
    return p, t, d, t * groups_per_node


@given(sizes())
def test_every_coordinate_has_one_slot_and_every_rank_too(sizes: tuple[int, int, int, int]) -> None:
    p, t, d, _ = sizes
    placement = place(*sizes)
    everywhere = {Coordinate(pp, dp, tp) for pp in range(p) for dp in range(d) for tp in range(t)}
    assert len(placement.slots) == p * t * d
    assert set(placement.slots) == everywhere
    assert sorted(placement.rank_of_slot(g) for g in range(p * t * d)) == list(range(p * t * d))


@given(sizes())
def test_slot_0_stays_rank_0_since_it_may_host_the_rendezvous(sizes: tuple[int, int, int, int]) -> None:
    assert place(*sizes).rank_of_slot(0) == 0


@given(sizes())
def test_a_tensor_group_is_consecutive_slots_of_one_node(sizes: tuple[int, int, int, int]) -> None:
    _, t, _, gpus_per_node = sizes
    slots = place(*sizes).slots
    for first in range(0, len(slots), t):
        assert slots[first : first + t] == tuple(slots[first]._replace(tp=tp) for tp in range(t))
        assert first // gpus_per_node == (first + t - 1) // gpus_per_node


def pairs_of(placement: Placement) -> list[tuple[int, int]]:
    """The slots of an evictor and its acceptor, pipeline by pipeline."""
    slot_of = {coordinate: slot for slot, coordinate in enumerate(placement.slots)}
    return [
        (slot, slot_of[coordinate._replace(pp=placement.p - 1 - coordinate.pp)])
        for coordinate, slot in slot_of.items()
        if 2 * coordinate.pp < placement.p - 1
    ]


def cut_nodes(placement: Placement) -> list[tuple[int, int]]:
    """The two nodes of every pair of tensor groups that is cut by a node's end."""
    nodes = [(a // placement.gpus_per_node, b // placement.gpus_per_node) for a, b in pairs_of(placement)]
    return [(a, b) for a, b in nodes[:: placement.t] if a != b]


@given(sizes())
def test_partners_are_neighbours(sizes: tuple[int, int, int, int]) -> None:
    p, t, d, _ = sizes
    pairs = pairs_of(place(*sizes))
    assert len(pairs) == p // 2 * t * d
    assert all(abs(a - b) == t for a, b in pairs)


@given(sizes())
def test_as_few_pairs_as_possible_cross_nodes(sizes: tuple[int, int, int, int]) -> None:
    """A node of an odd number of groups needs a middle stage or half a pair; any other node needs neither."""
    p, t, d, gpus_per_node = sizes
    placement = place(*sizes)
    groups_per_node = gpus_per_node // t
    odd_nodes = p * d // groups_per_node if groups_per_node % 2 and p * d > groups_per_node else 0
    middles = d if p % 2 else 0
    assert len(cut_nodes(placement)) == max(0, (odd_nodes - middles + 1) // 2)


@given(sizes())
def test_a_node_has_at_most_one_end_of_a_cut_pair(sizes: tuple[int, int, int, int]) -> None:
    nodes = [node for pair in cut_nodes(place(*sizes)) for node in pair]
    assert len(nodes) == len(set(nodes))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1, 8), "stages is 0: it must be at least 1"),
        ((4, 1, 1, 0), "GPUs per node is 0: it must be at least 1"),
        (
            (4, 3, 2, 8),
            "8 GPUs per node do not hold whole tensor-parallel groups of 3: "
            "choose a tensor-parallel size that divides 8",
        ),
        (
            (3, 2, 2, 8),
            "3 stages x 2 tensor-parallel x 2 data-parallel = 12 GPUs do not fill nodes of 8: "
            "choose a data-parallel size that is a multiple of 4, or other stages",
        ),
    ],
)
def test_sizes_that_cannot_be_placed_are_refused(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        place(*sizes)


def launched(rank: int, local_rank: int, world: int = 16, per_node: int = 8) -> dict[str, str]:
    """What torchrun sets."""
    values = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": per_node}
    return {name: str(value) for name, value in values.items()}


def test_apply_changes_rank_and_nothing_else() -> None:
    environ = launched(rank=10, local_rank=2)
    assert place(4, 2, 2, 8).apply(environ) == 14
    assert environ == launched(rank=14, local_rank=2)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "RANK is not set: start the processes with torchrun"),
        (launched(3, 3, world=8), "WORLD_SIZE is 8 but the placement is for .* = 16 processes: start that many"),
        (launched(3, 3, per_node=4), "LOCAL_WORLD_SIZE is 4 .* place for 4 GPUs per node"),
        (launched(14, 2), "RANK 14 with LOCAL_RANK 2 does not count slots node by node"),
    ],
)
def test_apply_refuses_a_launch_that_it_does_not_describe(environ: dict[str, str], message: str) -> None:
    before = dict(environ)
    with pytest.raises(ValueError, match=message):
        place(4, 2, 2, 8).apply(environ)
    assert environ == before


# Real process groups: eight gloo processes on pretended nodes of four GPUs.

Seen = dict[str, Any]
#: p, t, d; then the slots, each a digit, of every pipeline, tensor and data group, in the group's order.
MEGATRON = {
    "4 stages, 2-way data": ((4, 1, 2), "0231 4675", "0 1 2 3 4 5 6 7", "04 15 26 37"),
    "4 stages, 2-way tensor": ((4, 2, 1), "0462 1573", "01 23 45 67", "0 1 2 3 4 5 6 7"),
    "8 stages": ((8, 1, 1), "02467531", "0 1 2 3 4 5 6 7", "0 1 2 3 4 5 6 7"),
    "2 stages, 2-way tensor, 2-way data": ((2, 2, 2), "02 13 46 57", "01 23 45 67", "04 15 26 37"),
}
PER_NODE = 4


def case_of(sizes: tuple[int, int, int], placed: bool) -> dict[str, Any]:
    return {**dict(zip("ptd", sizes, strict=True)), "gpus_per_node": PER_NODE, "placed": placed}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[list[Seen]]:
    """``seen[case][slot]``: what each process of each case saw; one set of processes runs all cases."""
    folder = tmp_path_factory.mktemp("placement")
    (folder / "cases.json").write_text(
        json.dumps([*(case_of(row[0], True) for row in MEGATRON.values()), case_of((4, 1, 2), False)])
    )
    script = Path(__file__).with_name("groups_by_slot.py")
    run = subprocess.run([sys.executable, script, folder], timeout=800, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    by_slot = [json.loads((folder / f"slot-{slot}.json").read_text()) for slot in range(8)]
    return [list(case) for case in zip(*by_slot, strict=True)]


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_builds_the_expected_groups(name: str, seen: list[list[Seen]]) -> None:
    here = seen[list(MEGATRON).index(name)]
    for kind, drawing in zip(("pipeline", "tensor", "data"), MEGATRON[name][1:], strict=True):
        expected = [tuple(map(int, group)) for group in str(drawing).split()]
        assert sorted({tuple(process[kind]) for process in here}) == expected
    assert [process["local_rank"] for process in here] == [g % PER_NODE for g in range(8)]
    assert here[0]["rank"] == 0


def pairs_on_one_node(pipeline: list[int]) -> list[bool]:
    p = len(pipeline)
    return [pipeline[s] // PER_NODE == pipeline[p - 1 - s] // PER_NODE for s in range(p // 2)]


@pytest.mark.parametrize("name", MEGATRON)
def test_every_pair_of_megatrons_pipelines_shares_a_node(name: str, seen: list[list[Seen]]) -> None:
    for process in seen[list(MEGATRON).index(name)]:
        assert all(pairs_on_one_node(process["pipeline"]))


def test_megatrons_own_order_puts_every_pair_on_two_nodes(seen: list[list[Seen]]) -> None:
    for process in seen[-1]:
        assert not any(pairs_on_one_node(process["pipeline"]))
