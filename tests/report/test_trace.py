"""A trace says what the timeline says, in the form that Perfetto reads."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from evenpipe.report.timeline import Timeline, perfetto_trace
from evenpipe.schedule import lower, parse
from evenpipe.simulate import Costs, Span, Wire, simulate
from tests.schedules import build


def timeline(name: str = "1f1b", chunks: int = 1, bpipe: bool = True, batches: int = 1) -> Timeline:
    wire = Wire(latency_ms=2.0, transmit_ms=1.0)
    costs = Costs((3.0,) * 4, (6.0,) * 4, wires={"evict": wire, "load": wire})
    return Timeline.of(simulate(lower(build(name, 4, 8, chunks, bpipe, batches)), costs), "a title")


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize(
    ("name", "chunks", "bpipe"), [("1f1b", 1, True), ("interleaved", 2, True), ("gpipe", 1, False)]
)
def test_the_timeline_can_be_read_back(name: str, chunks: int, bpipe: bool) -> None:
    drawn = timeline(name, chunks, bpipe)
    trace = json.loads(json.dumps(perfetto_trace(drawn)))
    read = defaultdict(list)
    for event in slices(trace):
        start_ms = event["ts"] / 1e3
        read[event["pid"]].append(Span(parse(event["name"]), start_ms, start_ms + event["dur"] / 1e3))
    assert trace["format"] == "evenpipe.trace/1"
    for stage, spans in enumerate(drawn.stages):
        assert sorted(read[stage]) == sorted(spans)


def test_a_stage_is_a_process_with_a_compute_thread_and_transfers() -> None:
    trace = perfetto_trace(timeline())
    names = {
        (event["pid"], event["tid"], event["name"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] in ("process_name", "thread_name")
    }
    assert [names[stage, 0, "process_name"] for stage in range(4)] == ["stage 0", "stage 1", "stage 2", "stage 3"]
    assert names[0, 0, "thread_name"] == "compute"
    assert names[0, 1, "thread_name"] == "transfers"
    assert (1, 1, "thread_name") not in names  # stages 1 and 2 of Figure 4 move nothing
    for event in slices(trace):
        assert (event["tid"] == 0) == (event["cat"] in ("forward", "backward"))


def test_an_update_is_between_what_is_computed() -> None:
    """An instant when it takes no time, as in a simulation; a slice when it takes some, as in a run."""
    events = perfetto_trace(timeline("2bw", bpipe=False, batches=3))["traceEvents"]
    updates = [event for event in events if event.get("cat") == "update"]
    assert len(updates) == 4 * 3
    assert {(event["ph"], event["s"], event["tid"]) for event in updates} == {("i", "t", 0)}
    assert [(event["name"], event["args"]) for event in updates[:2]] == [("U0", {"batch": 0}), ("U1", {"batch": 1})]
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {"compute"}

    measured = Timeline("", ((Span(parse("F0"), 0.0, 1.0), Span(parse("U0"), 1.0, 1.5), Span(parse("B0"), 1.5, 2.0)),))
    assert [(event["name"], event["tid"], event["ts"], event["dur"]) for event in slices(perfetto_trace(measured))] == [
        ("F0", 0, 0.0, 1000.0),
        ("U0", 0, 1000.0, 500.0),
        ("B0", 0, 1500.0, 500.0),
    ]


def test_slices_of_one_thread_never_overlap() -> None:
    """Perfetto drops a slice that begins in another one of its thread and ends after it."""
    overlapping = tuple(
        Span(parse(text), start, start + 3.0) for text, start in (("E1", 0.0), ("L0", 1.0), ("E2", 2.0))
    )
    threads = defaultdict(list)
    for event in slices(perfetto_trace(Timeline("", (overlapping,)))):
        threads[event["tid"]].append(event)
    assert len(threads) == 3
    for events in threads.values():
        for before, after in pairwise(sorted(events, key=lambda event: event["ts"])):
            assert before["ts"] + before["dur"] <= after["ts"]


def test_rows_have_the_names_that_the_timeline_gives_them() -> None:
    trace = perfetto_trace(Timeline("", ((), ()), ("stage 0 (rank 7)", "stage 0 (rank 3)")))
    processes = [event for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert [(event["pid"], event["args"]["name"]) for event in processes] == [
        (0, "stage 0 (rank 7)"),
        (1, "stage 0 (rank 3)"),
    ]
