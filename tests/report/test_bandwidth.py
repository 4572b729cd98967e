"""Bandwidth that transfers need: the paper's numbers (appendix B), and the table and lines a user reads."""

from __future__ import annotations

import pytest

from evenpipe.report.bandwidth import (
    JobLayout,
    MeasuredPair,
    ModelShape,
    ProcessLocation,
    Recompute,
    bandwidth_warnings,
    forward_flops,
    required_gbps,
    transfer_bytes,
)
from evenpipe.runtime.placement import place
from tests.runtime.locations import printed, processes

GPT3_96B = ModelShape(layers=80, heads=104, hidden=9984, sequence_length=2048)
FORWARD_MS = 143.37
"""Table 3, GPT-3 96B with 4-way tensor and 8-way pipeline parallelism, micro-batch size 2."""


def bytes_of_96b(recompute: Recompute) -> float:
    return transfer_bytes(GPT3_96B, p=8, t=4, b=2, recompute=recompute, sequence_parallel=True)


def test_bytes_of_the_papers_fastest_configuration() -> None:
    assert bytes_of_96b("selective") / 1e9 == pytest.approx(3.48, abs=0.005)


@pytest.mark.parametrize(("recompute", "gbps"), [("selective", 24.25), ("none", 100.31)])
def test_bandwidth_of_the_papers_fastest_configuration(recompute: Recompute, gbps: float) -> None:
    assert required_gbps(bytes_of_96b(recompute), FORWARD_MS) == pytest.approx(gbps, abs=0.005)


def test_flops_of_the_papers_fastest_configuration() -> None:
    """The 96B of its name: a forward is two operations a parameter and token, plus attention (l/6h more)."""
    tokens, stages, tensor = 2 * 2048, 8, 4
    flops = forward_flops(GPT3_96B, stages, tensor, 2) * stages * tensor
    assert flops / (1 + 2048 / (6 * 9984)) / (2 * tokens) == pytest.approx(96e9, rel=0.01)


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "strict"),
    [
        ("none", True, 44 / 2),
        ("selective", True, 34 / 2),
        ("full", True, 2 / 2),
        ("none", False, 10 + (24 + 10) / 2),
        ("selective", False, 10 + 24 / 2),
        ("full", False, 2),
    ],
)
def test_equations_7_to_9(recompute: Recompute, sequence_parallel: bool, strict: float) -> None:
    """In units of Llbh / (p f), worked out for t=2 and 5Hl/h = 10: L=10, H=4, h=1000, l=500, b=3, p=5, f=1 ms.

    The paper's own are those with sequence parallelism, and without it where layers are recomputed.
    """
    unit = 10 * 500 * 3 * 1000 / 5 / 1e-3 / 1e9
    shape = ModelShape(layers=10, heads=4, hidden=1000, sequence_length=500)
    nbytes = transfer_bytes(shape, 5, 2, 3, recompute, sequence_parallel=sequence_parallel)
    assert required_gbps(nbytes, 1.0) == pytest.approx(strict * unit)


def warnings(*pairs: MeasuredPair) -> tuple[str, ...]:
    return bandwidth_warnings(pairs, 12.0, across_nodes="move it", within_nodes="recompute more")


def test_links_that_are_fast_enough_need_no_warning() -> None:
    assert warnings(MeasuredPair(0, 3, False, 300.0), MeasuredPair(0, 3, True, 12.0)) == ()
    assert warnings() == ()


def test_slow_links_are_told_by_kind_with_what_to_do() -> None:
    assert warnings(MeasuredPair(0, 7, True, 7.5), MeasuredPair(1, 6, False, 10.0), MeasuredPair(0, 7, True, 9.0)) == (
        "2 of 3 evictor-acceptor pairs cross nodes and have slow links (stages 0-7): 7.50 GB/s, so that training may "
        "wait for transfers, which need 8.00 to 12.00 GB/s; move it",
        "1 of 3 evictor-acceptor pairs share a node and have slow links (stages 1-6): 10.00 GB/s, below the 12.00 GB/s "
        "that hide a transfer behind one forward, above the 8.00 GB/s that hide two behind a backward and a forward: "
        "hidden, but for a part of each load where all of a device's work passes one queue "
        "(CUDA_DEVICE_MAX_CONNECTIONS=1); recompute more",
    )


def test_many_stages_are_not_all_listed() -> None:
    (warning,) = warnings(*(MeasuredPair(s, 63 - s, True, 1.0) for s in reversed(range(31))))
    assert "(stages 0-63, 1-62, 2-61, 3-60 and 27 more)" in warning


def test_bad_input_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^forward time is 0 ms: give the time"):
        required_gbps(1e9, 0)
    with pytest.raises(ValueError, match=r"^recompute scope 'attention' is unknown: choose none, selective or full$"):
        transfer_bytes(GPT3_96B, 8, 4, 2, "attention", sequence_parallel=True)  # type: ignore[arg-type]


EVICTIONS = (4, 0, 0, 0)


def shown(table):
    lines = [line.replace("┃", "│") for line in printed(table)]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]


def test_the_table_has_a_row_a_stage_of_rank_0s_pipeline():
    mixed = [*processes("BBBB", pipeline=1), *reversed(processes("ABBA"))]
    assert shown(JobLayout(mixed, EVICTIONS).table(8.5)) == [
        ["stage", "node", "local rank", "rank", "role", "partner", "link", "needs GB/s", "has GB/s"],
        ["0", "A (host)", "0", "0", "evictor", "3", "same node", "8.50", "10.00"],
        ["1", "B (host)", "0", "10", "alone", "", "", "", ""],
        ["2", "B (host)", "0", "20", "alone", "", "", "", ""],
        ["3", "A (host)", "0", "30", "acceptor", "0", "same node", "8.50", "13.00"],
    ]


def test_a_pair_is_as_fast_as_its_slower_direction():
    layout = JobLayout([*processes("ABBA"), *processes("AABB", 1, 2.0)], EVICTIONS)
    assert layout.pairs == (MeasuredPair(0, 3, False, 10.0), MeasuredPair(0, 3, True, 2.0))


@pytest.mark.parametrize(
    ("others", "summary"),
    [
        ([], "0 of 1 pairs cross nodes"),
        ([processes("CDDC", 1)], "all 2 pipelines sit like this one; 0 of 2 pairs cross nodes"),
        (
            [processes("CDDC", 1), processes("CCDD", 2)],
            "2 of 3 pipelines sit like this one; 1 of 3 pairs cross nodes",
        ),
    ],
)
def test_the_summary_counts_every_pipeline(others, summary):
    everybody = [*processes("ABBA"), *(process for other in others for process in other)]
    assert JobLayout(everybody, EVICTIONS).summary() == summary


def test_pipelines_of_64_stages_are_shown_whole():
    placement = place(64, 1, 1, 8)
    rows = [
        ProcessLocation(placement.rank_of_slot(slot), 0, c.pp, str(slot // 8), "host", slot % 8, 1.0, 1e12)
        for slot, c in enumerate(placement.slots)
    ]
    table = shown(JobLayout(rows, [1] * 31 + [0] * 33).table(1.0))
    assert [row[0] for row in table[1:]] == [str(stage) for stage in range(64)]
    assert {row[6] for row in table[1:]} == {"same node", ""}
