"""Megatron's log and TensorBoard have EvenPipe's figures; a traced iteration becomes a file."""

import json
import re

import pytest

from tests.megatron_lm.launch import LAYOUTS, gpt_flags, launch
from tests.schedules import build


def logged(output):
    """EvenPipe's lines: figures per stage, by iteration and name."""
    lines = re.findall(r"\[evenpipe\] iteration (\d+) \| (.*) \|", output)
    return {
        int(iteration): {
            name: [float(value) for value in values.split()]
            for name, _, values in (column.partition(": ") for column in columns.split(" | "))
        }
        for iteration, columns in lines
    }


@pytest.mark.every_release
def test_the_log_has_a_line_for_each_of_megatrons(megatron_lm, tmp_path):
    """Every third iteration is measured: it has the peaks that the schedule promises."""
    trace = tmp_path / "T.json"
    flags = [*gpt_flags(7), *LAYOUTS["PP4"][1], "--log-interval", "3", "--bpipe", "--evenpipe-trace", str(trace)]
    run = launch(megatron_lm, "pretrain_gpt.py", 4, [*flags, "--evenpipe-trace-iteration", "4"])
    iterations = [int(number) for number in re.findall(r"iteration\s+(\d+)/\s*7 \|", run.output)]
    figures = logged(run.output)
    assert list(figures) == iterations
    assert iterations[-2:] == [3, 6]
    for line in figures.values():
        assert line["peak live"] == [3, 3, 2, 3]
        evicted, saved = line["evicted MiB"], line["peak saved MiB"]
        assert evicted[0] == pytest.approx(saved[0], abs=0.1)  # three evictions, and three live at most
        assert evicted[1:] == [0, 0, 0]
        exposed = line["transfers exposed ms"]
        assert exposed[0] > 0
        assert exposed[1:3] == [0, 0]

    document = json.loads(trace.read_text())
    assert document["otherData"]["title"] == "iteration 4"
    assert f"timeline of iteration 4 from 4 ranks: {trace} " in run.output
    schedule = build("1f1b", 4, 8, bpipe=True)
    for stage in range(4):
        names = [event["name"] for event in document["traceEvents"] if event["ph"] == "X" and event["pid"] == stage]
        assert sorted(names) == sorted(map(str, schedule.actions[stage]))


def test_replicas_share_a_line_and_have_rows_of_their_own(megatron_lm, tmp_path):
    pytest.importorskip("tensorboard", reason="Megatron writes for TensorBoard only where it is installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trace, board = tmp_path / "T.json", tmp_path / "board"
    processes, parallel = LAYOUTS["DP2xPP2 distributed optimizer"]
    flags = [*gpt_flags(3), *parallel, "--evenpipe-schedule", "1f1b", "--tensorboard-dir", str(board)]
    run = launch(megatron_lm, "pretrain_gpt.py", processes, [*flags, "--evenpipe-trace", str(trace)])
    figures = logged(run.output)
    assert [line["peak live"] for line in figures.values()] == [[2, 1]] * 3
    rows = [e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert rows == [f"stage {s}, data {d}, tensor 0 (rank {2 * s + d})" for d in range(2) for s in range(2)]

    written = EventAccumulator(str(board)).Reload()
    for stage in range(2):
        live = written.Scalars(f"evenpipe/peak-live/stage-{stage}")
        assert [(event.step, event.value) for event in live] == [(n, 2 - stage) for n in (1, 2, 3)]
        for figure in ("peak-saved-MiB", "evicted-MiB", "transfers-exposed-ms"):
            assert len(written.Scalars(f"evenpipe/{figure}/stage-{stage}")) == 3


def test_a_run_without_evenpipes_flags_has_none_of_it(megatron_lm):
    run = launch(megatron_lm, "pretrain_gpt.py", 2, [*gpt_flags(1), *LAYOUTS["PP2"][1]])
    assert "[evenpipe]" not in run.output
