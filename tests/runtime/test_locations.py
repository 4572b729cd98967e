"""Which stage sits where, and what its link carries: as a user reads it."""

import pytest

from evenpipe.runtime.bandwidth import JobLayout, MeasuredPair, ProcessLocation
from evenpipe.runtime.placement import place
from tests.runtime.locations import printed, processes

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
