"""``--schedule searched``, ``--costs`` and ``--front``: what they print, write, and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evenpipe.cli.main import main
from evenpipe.schedule import Schedule, verify
from evenpipe.simulate import front

SIZES = ("--stages", "4", "--micro-batches", "6")
QUICK = ("--seconds", "0.1")


def document(**changes: Any) -> dict[str, Any]:
    parts = [{"forward_ms": 1, "input_gradient_ms": 1, "weight_gradient_ms": 1, "saved_bytes": 100}] * 7
    parts = [*parts, {**parts[0], "forward_ms": 1.5}]
    given = {"format": "evenpipe.costs/1", "placement": "vee", "message_ms": 0.1, "parts": parts}
    return given | {"memory_bytes": [600] * 4} | changes


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(document()))
    return str(path)


def traced(*actions: str, dur: float = 5.0) -> str:
    """A trace of one stage."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "stage 0, data 0"}}]
    events += [{"ph": "X", "name": action, "pid": 0, "dur": dur} for action in actions]
    return json.dumps({"format": "evenpipe.trace/1", "traceEvents": events})


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()[-1]


def test_a_searched_schedule_is_written_simulated_and_drawn(
    costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, picture = tmp_path / "S.txt", tmp_path / "S.png"
    words = ["schedule", "--schedule", "searched", "--costs", costs, *SIZES, *QUICK]
    assert main([*words, "--out", str(table), "--picture", str(picture), "--json"]) == 0
    said = capsys.readouterr()
    assert "evenpipe: searched: best of" in said.err
    assert json.loads(said.out)["name"] == "searched"
    schedule = Schedule.parse(table.read_text())
    verify(schedule)
    assert max(schedule.peak_live) <= 6
    assert picture.stat().st_size > 1000
    took = {}
    for name in (f"file:{table}", "v-half"):
        assert main(["simulate", "--schedule", name, "--costs", costs, *SIZES, "--json"]) == 0
        took[name] = json.loads(capsys.readouterr().out)
    assert took[f"file:{table}"]["makespan_ms"] < took["v-half"]["makespan_ms"]
    assert took["v-half"]["costs"]["parts_ms"][0] == [[1, 1, 1], [1.5, 1, 1]]
    assert main(["simulate", "--schedule", "zbv", "--costs", costs, *SIZES]) == 0
    assert "800 of 600, too much" in capsys.readouterr().out


def test_whole_backwards(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["schedule", "--schedule", "searched", "--costs", costs, *SIZES, *QUICK, "--whole-backwards", "--json"]
    assert main(words) == 0
    actions = json.loads(capsys.readouterr().out)["actions"]
    assert {action[0] for row in actions for action in row} == {"F", "B"}


def straight(path: Path, **changes: Any) -> str:
    """Costs of one part a stage, whose evictions take a forward."""
    parts = [{"forward_ms": 2, "input_gradient_ms": 2, "weight_gradient_ms": 2, "saved_bytes": 100}] * 4
    given = document(placement="straight", parts=parts, memory_bytes=[300] * 4, peer_bytes_per_ms=50)
    path.write_text(json.dumps(given | changes))
    return str(path)


def test_a_searched_schedule_that_evicts_says_how_it_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs, table = straight(tmp_path / "costs.json"), tmp_path / "S.txt"
    sizes = ("--stages", "4", "--micro-batches", "8")
    words = ["schedule", "--schedule", "searched", "--costs", costs, *sizes, *QUICK, "--out", str(table)]
    assert main([*words, "--json"]) == 0
    said = capsys.readouterr()
    assert "evenpipe: searched: stages evict to their partners: a run by this table needs --bpipe" in said.err
    found = json.loads(said.out)
    assert found["bpipe"]
    assert found["bounds"] == [3, 3, 3, 3]
    assert found["evictions"] == [3, 0, 0, 0]
    words = ["simulate", "--schedule", f"file:{table}", "--costs", costs]
    assert main([*words, "--bpipe"]) == 0
    assert "300 of 300" in capsys.readouterr().out
    assert "evicts to partner stages, and is run as it is: add" in refusal(capsys, *words)


def test_a_searched_schedule_that_swaps_says_how_it_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs, table = tmp_path / "costs.json", tmp_path / "S.txt"
    given = json.loads(Path(straight(costs)).read_text())
    costs.write_text(json.dumps(given | {"peer_bytes_per_ms": None, "host_bytes_per_ms": 50}))
    sizes = ("--stages", "4", "--micro-batches", "8")
    assert main(["schedule", "--schedule", "searched", "--costs", str(costs), *sizes, *QUICK, "--out", str(table)]) == 0
    assert "evenpipe: searched: stages swap to their hosts: a run by this table needs --evenpipe-swap 1" in (
        capsys.readouterr().err
    )
    assert main(["simulate", "--schedule", f"file:{table}", "--costs", str(costs)]) == 0
    assert "300 of 300" in capsys.readouterr().out


@pytest.fixture
def searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first command of a test searches, and the others show what it found."""
    search, found = front.front, list[front.Front]()

    def once(*asked: Any) -> front.Front:
        if not found:
            found.append(search(*asked))
        return found[0]

    monkeypatch.setattr(front, "front", once)


def test_the_front_of_straight_stages_that_evict(
    searched_once: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = straight(tmp_path / "costs.json")
    words = ["simulate", "--front", "--costs", costs, "--stages", "4", "--micro-batches", "8", *QUICK]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    pairs = zip(found["searched"], found["evicting"], strict=True)
    gains = [(one["peak_bytes"], one["batch_ms"] / other["batch_ms"]) for one, other in pairs]
    assert all(gain >= 1 for _, gain in gains)
    assert dict(gains)[300] > 1.04
    assert main(words) == 0
    assert "straight, evicting" in capsys.readouterr().out


def test_a_v_is_not_searched_for_evictions(costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "vee.json"
    path.write_text(json.dumps(document(peer_bytes_per_ms=50)))
    assert main(["schedule", "--schedule", "searched", "--costs", str(path), *SIZES, *QUICK, "--json"]) == 0
    said = capsys.readouterr()
    assert "nothing is evicted to partners: only straight placements are searched for that" in said.err
    assert not any(json.loads(said.out)["evictions"])


def test_the_front(searched_once: None, costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, picture = ["simulate", "--front", "--costs", costs, *SIZES, *QUICK], tmp_path / "front.png"
    assert main([*words, "--json", "--picture", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert picture.stat().st_size > 1000
    known = {one["name"]: one for one in found["known"]}
    assert {"1f1b", "1f1b + BPipe", "gpipe", "kfkb", "zb-h1", "zb-h2"} <= set(known)
    assert {"v-half", "v-min", "zbv", "dualpipev"} <= set(known)
    assert found["base_bytes"] == known["1f1b"]["peak_bytes"] == 4 * 200
    assert known["v-half"]["peak_bytes"] == 600
    speeds = [one["batch_ms"] for one in found["searched"]]
    assert speeds == sorted(speeds, reverse=True)
    for one in found["searched"]:
        assert one["batch_ms"] >= found["limit_ms"]
        fitting = [each["batch_ms"] for each in known.values() if each["peak_bytes"] <= one["peak_bytes"]]
        assert one["batch_ms"] <= min(fitting, default=one["batch_ms"])
    assert main(words) == 0
    assert "best known" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["schedule", "--schedule", "searched", *SIZES], "--schedule searched: for which times? Give --costs"),
        (["simulate", "--front", *SIZES], "--front: for which times? Give --costs COSTS.json"),
        (["simulate", "--front", "--schedule", "1f1b", "--costs", "C", *SIZES], "--schedule: --front is of all"),
        (["schedule", "--schedule", "searched", "--costs", "C", "--stages", "4"], "--micro-batches: how many? --costs"),
        (
            ["schedule", "--schedule", "searched", "--costs", "C", *SIZES, "--chunks", "2"],
            "--chunks: --schedule searched goes by the parts and the placement of --costs: leave --chunks out",
        ),
        (
            ["schedule", "--schedule", "searched", "--costs", "C", "--stages", "3", "--micro-batches", "4"],
            "--costs: 8 parts, and vee on 3 stages has 6: give as many",
        ),
        (
            ["simulate", "--schedule", "1f1b", "--costs", "C", *SIZES],
            "--costs: its parts are placed vee, those of 1f1b otherwise",
        ),
        (
            ["simulate", "--schedule", "zbv", "--costs", "C", "--forward-ms", "1", *SIZES],
            "--forward-ms: --costs has all times: leave --forward-ms or --costs out",
        ),
        (["simulate", "--schedule", "zbv", "--costs", "/nowhere", *SIZES], "/nowhere: No such file or directory"),
        (["simulate", *SIZES], "--schedule: which? Give one of"),
        (
            ["schedule", "--schedule", "searched", "--costs", "C", "--stages", "4", "--micro-batches", "999999999"],
            "--micro-batches 999999999: makes 23,999,999,976 actions, and an order of at most 500,000 is searched",
        ),
        (["simulate", "--front", "--costs", "C", "--link-ms", "1", *SIZES], "--link-ms: --front is of all schedules"),
        (["simulate", "--schedule", "zbv", "--seed", "3", *SIZES], "--seed: is of --schedule searched: leave --seed"),
        (
            ["schedule", "--schedule", "1f1b", "--costs", "C", *SIZES],
            "--costs: its parts are placed vee, those of 1f1b",
        ),
        (["schedule", "--schedule", "searched", "--costs", "C", *SIZES, "--seed", "-1"], "'-1': give a whole number"),
        (
            ["schedule", "--schedule", "searched", "--costs", "C", *SIZES, "--seconds", "0"],
            "0 is no time; give a finite number of seconds above 0",
        ),
    ],
)
def test_refusals(words: list[str], said: str, costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(capsys, *(costs if word == "C" else word for word in words))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory_bytes": [600] * 3}, "--costs: memory_bytes has 3 caps for 4 stages: give one a stage"),
        ({"memory_bytes": [600, 150, 600, 600]}, "memory_bytes of stage 1 is 150, and one micro-batch alone needs 200"),
        ({"placement": "zigzag"}, "placement: must be 'straight', 'loop' or 'vee'"),
        ({"message_ms": -1}, "message_ms: must be greater than or equal to 0"),
        ({"memory_bytes": [10**400] * 4}, "memory_bytes.0: must be less than or equal to"),
        ({"part": []}, "part: unknown key"),
        ({"peer_bytes_per_ms": 0}, "peer_bytes_per_ms: must be greater than or equal to"),
        ({"parts": []}, "parts: has too few items"),
        ({"parts": [{**document()["parts"][0], "recomputed_bytes": 101}] * 8}, "=101: more than saved_bytes=100"),
        (
            {"parts": [{"forward_ms": 0, "input_gradient_ms": 0, "weight_gradient_ms": 0}] * 8},
            "no part takes any time: give what was measured",
        ),
        (
            {"parts": [{"forward_ms": 1, "input_gradient_ms": 1}] * 8},
            "parts.0.weight_gradient_ms: is missing: give a document evenpipe.costs/1",
        ),
    ],
)
def test_documents_that_cannot_be(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(document(**changes)))
    assert said in refusal(capsys, "schedule", "--schedule", "searched", "--costs", str(path), *SIZES)


def test_an_engine_says_how_a_searched_schedule_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "train", "--schedule", "searched", "--stages", "2", "--micro-batches", "2")
    assert "an order for the run's own times (`evenpipe schedule --schedule searched --costs COSTS" in said


@pytest.mark.parametrize("schedule", ["zbv", "v-half"])
def test_the_costs_of_a_trace_are_those_of_its_run(
    schedule: str, costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts write traces in the same form; the parts come back in the order of the model."""
    trace, out = tmp_path / "T.json", tmp_path / "again.json"
    words = ["simulate", "--schedule", schedule, "--costs", costs, *SIZES, "--trace", str(trace)]
    assert main(words) == 0
    given = ["--message-ms", "0.1", "--saved-bytes", "100", "--recomputed-bytes", "9", "--memory-bytes", "600"]
    given += ["--peer-bytes-per-ms", "50", "--host-bytes-per-ms", "25"]
    assert main(["costs", str(trace), *given, "--out", str(out)]) == 0
    assert "weight gradient ms" in capsys.readouterr().out
    found, true = (json.loads(Path(path).read_text()) for path in (out, costs))
    for one, other in zip(found.pop("parts"), true.pop("parts"), strict=True):
        assert one.pop("freed_by_input_gradient_bytes") == one.pop("staying_bytes") == 0
        assert (one.pop("recomputed_bytes"), one.pop("recompute_ms")) == (9, None)
        assert one == pytest.approx(other)
    assert found == true | {"peer_bytes_per_ms": 50, "host_bytes_per_ms": 25}


def test_the_costs_of_interleaved_stages_are_those_of_a_v(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same parts in the order of the model; whole backwards count half for each gradient."""
    path, trace = tmp_path / "loop.json", tmp_path / "T.json"
    path.write_text(json.dumps(document(placement="loop", memory_bytes=None)))
    sizes = ["--stages", "4", "--micro-batches", "8", "--chunks", "2"]
    assert main(["simulate", "--schedule", "interleaved", "--costs", str(path), *sizes, "--trace", str(trace)]) == 0
    capsys.readouterr()
    assert main(["costs", str(trace), "--traced", "loop", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["placement"] == "vee"
    assert [one["forward_ms"] for one in found["parts"]] == pytest.approx([1] * 7 + [1.5])
    assert [one["input_gradient_ms"] for one in found["parts"]] == pytest.approx([1] * 8)


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("{}", [], "is no trace evenpipe.trace/1: name what --evenpipe-trace or --trace wrote"),
        ("[", [], "is no trace evenpipe.trace/1"),
        ('{"format": "evenpipe.trace/1", "traceEvents": []}', [], "has no compute"),
        (None, ["--saved-bytes", "1,2"], "--saved-bytes: 2 numbers for 8 parts: give one, or one for each part"),
        (None, ["--memory-bytes", "1,2"], "--memory-bytes: 2 numbers for 4 stages: give one"),
        (None, ["--placement", "straight"], "--placement straight: the run had 2 parts a stage"),
        (None, ["--peer-bytes-per-ms", "0"], "0 is no speed; give a finite number of bytes a millisecond above 0"),
        (None, ["--memory-bytes", "much"], "'much': give whole numbers of bytes"),
        ("[" * 200_000, [], "is no trace evenpipe.trace/1"),
        (traced("F0"), ["--traced", "loop"], "has no forward, or no backward, of chunk 0 on stage 0"),
        (traced("F0", "B0"), [], "--traced vee: the run had 1 model chunks a stage, and a V has 2: give loop"),
        (traced("F0", "B0"), ["--traced", "loop"], "--placement vee: the run had 1 parts a stage"),
        (
            traced("F0", "B0", dur=-5),
            ["--traced", "loop", "--placement", "straight"],
            "forward_ms: must be greater than or equal to 0: trace another iteration",
        ),
    ],
)
def test_traces_that_cannot_be(
    text: str | None, words: list[str], said: str, costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "T.json"
    if text is None:
        main(["simulate", "--schedule", "zbv", "--costs", costs, *SIZES, "--trace", str(trace)])
        capsys.readouterr()
    else:
        trace.write_text(text)
    assert said in refusal(capsys, "costs", str(trace), *words)
