"""One iteration of all ranks of a script becomes one document."""

import json
from pathlib import Path

import pytest

from tests.job_server import run_script
from tests.reports import MEGATRON
from tests.schedules import build

SCRIPT = Path(__file__).with_name("trace_cases.py")


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The folder in which a traced run has left its document and what each rank printed."""
    folder = tmp_path_factory.mktemp("trace")
    run = run_script(MEGATRON, SCRIPT, folder)
    assert run.returncode == 0, run.stderr
    return folder


def test_rows_are_ranks_by_replica_then_stage(traced):
    document = json.loads((traced / "T.json").read_text())
    processes = [event for event in document["traceEvents"] if event["name"] == "process_name"]
    assert document["format"] == "evenpipe.trace/1"
    assert document["otherData"] == {"title": "iteration 12"}
    assert [event["args"]["name"] for event in processes] == [
        f"stage {stage}, data {data}, tensor 0 (rank {2 * stage + data})" for data in range(2) for stage in range(4)
    ]


def test_a_row_has_what_the_stage_did(traced):
    document = json.loads((traced / "T.json").read_text())
    schedule = build("1f1b", 4, 6, bpipe=True)
    for row in range(8):
        slices = [event for event in document["traceEvents"] if event["ph"] == "X" and event["pid"] == row]
        assert sorted(event["name"] for event in slices) == sorted(map(str, schedule.actions[row % 4]))
        compute = [event for event in slices if event["tid"] == 0]
        done = [event["name"] for event in sorted(compute, key=lambda event: event["ts"])]
        assert done == [str(action) for action in schedule.actions[row % 4] if action.kind in "FB"]


def test_rank_0_tells_where_it_is_and_nobody_else_speaks(traced):
    said = [(traced / f"rank-{rank}").read_text() for rank in range(8)]
    assert said[0] == f" [evenpipe] timeline of iteration 12 from 8 ranks: {traced}/T.json (open in ui.perfetto.dev)\n"
    assert said[1:] == [""] * 7
