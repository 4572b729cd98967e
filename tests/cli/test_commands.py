"""``evenpipe schedule`` and ``evenpipe simulate``: what they print and write."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from evenpipe import __version__
from evenpipe.cli.main import main
from evenpipe.cli.parser import COMMANDS, Parser

BPIPE = ["--schedule", "1f1b", "--stages", "4", "--micro-batches", "8", "--bpipe"]
TWO_BW = ["--schedule", "2bw", "--stages", "4", "--micro-batches", "4"]
KFKB = ["--schedule", "kfkb", "--group-size", "2", "--stages", "2", "--micro-batches", "5"]
INTERLEAVED = ["--schedule", "interleaved", "--stages", "4", "--micro-batches", "8", "--chunks", "2"]


def json_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    document: dict[str, Any] = json.loads(captured.out)
    return document


def test_the_schedule_of_figure_4_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    document = json_of(capsys, "schedule", *BPIPE)
    assert document["format"] == "evenpipe.schedule/1"
    assert (document["stages"], document["micro_batches"]) == (4, 8)
    assert document["actions"][0][:5] == ["F0", "F1", "E1", "F2", "F3"]
    assert document["bound"] == 3
    assert document["peak_live"] == [3, 3, 2, 3]
    assert document["evictions"] == [3, 0, 0, 0]
    assert (document["name"], document["chunks"], document["bpipe"]) == ("1f1b", 1, True)


def test_an_interleaved_schedule_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    document = json_of(capsys, "schedule", *INTERLEAVED)
    assert document["chunks"] == 2
    assert "F0.1" in document["actions"][0]
    assert document["peak_live"] == [11, 9, 7, 5]


def test_a_stream_of_batches_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    document = json_of(capsys, "schedule", *TWO_BW, "--batches", "2")
    assert (document["name"], document["batches"], document["micro_batches"]) == ("2bw", 2, 4)
    assert " ".join(document["actions"][3]) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 U0 B7 U1"
    assert document["peak_live"] == [4, 3, 2, 1]
    levelled = json_of(capsys, "schedule", *TWO_BW, "--bpipe")
    assert (levelled["batches"], levelled["bound"], levelled["peak_live"]) == (3, 3, [3, 3, 2, 3])


def test_groups_of_micro_batches_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    document = json_of(capsys, "schedule", *KFKB)
    assert (document["name"], document["group_size"]) == ("kfkb", 2)
    assert " ".join(document["actions"][1]) == "F0 F1 B0 B1 F2 F3 B2 B3 F4 B4"
    assert document["peak_live"] == [4, 2]
    assert json_of(capsys, "schedule", *INTERLEAVED)["group_size"] == 1


@pytest.mark.parametrize("batches", [1, 3, 10])
def test_a_stream_takes_the_time_of_its_compute_and_fills_and_drains_once(
    batches: int, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json_of(capsys, "simulate", *TWO_BW, "--batches", str(batches))
    assert document["makespan_ms"] == (4 * batches + 4 - 1) * 3.0
    updates = [span for span in document["timeline"][0] if span["action"].startswith("U")]
    assert [span["action"] for span in updates] == [f"U{batch}" for batch in range(batches)]
    assert updates[-1] == {
        "action": f"U{batches - 1}",
        "start_ms": document["makespan_ms"],
        "end_ms": document["makespan_ms"],
    }


def test_a_simulation_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    times = ["--forward-ms", "10", "--backward-ms", "20,20,20,20", "--transfer-ms", "5"]
    document = json_of(capsys, "simulate", *BPIPE, *times)
    assert document["format"] == "evenpipe.simulation/1"
    assert document["makespan_ms"] == (8 + 4 - 1) * 30.0
    assert document["bubble_fraction"] == pytest.approx(3 / 11)
    assert document["stages"][0] == {"busy_ms": 240.0, "idle_ms": 90.0, "peak_live": 3}
    assert document["timeline"][0][:3] == [
        {"action": "F0", "start_ms": 0.0, "end_ms": 10.0},
        {"action": "F1", "start_ms": 10.0, "end_ms": 20.0},
        {"action": "E1", "start_ms": 20.0, "end_ms": 25.0},
    ]


def test_links_and_synchronous_transfers_take_time(capsys: pytest.CaptureFixture[str]) -> None:
    free = json_of(capsys, "simulate", *BPIPE, "--transfer-ms", "0.5")["makespan_ms"]
    swapped = ("--transfer-ms", "0.5", "--swap-mib", "16", "--host-gbps")
    assert json_of(capsys, "simulate", *BPIPE, *swapped, "1e3")["makespan_ms"] == pytest.approx(free, rel=0.01)
    assert json_of(capsys, "simulate", *BPIPE, *swapped, "1")["makespan_ms"] > 2 * free
    assert json_of(capsys, "simulate", *BPIPE, "--link-ms", "0.5")["makespan_ms"] > free
    waiting = json_of(capsys, "simulate", *BPIPE, "--transfer-ms", "0.5", "--synchronous-transfers")
    assert waiting["makespan_ms"] > free


@pytest.mark.parametrize("flags", [["--schedule", "v-half"], ["--schedule", "1f1b", "--bpipe"]])
def test_a_table_that_is_written_is_the_schedule(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, more = tmp_path / "S.txt", flags[2:]
    main(["schedule", *flags, "--stages", "4", "--micro-batches", "6", "--out", str(table), "--json"])
    written = json.loads(capsys.readouterr().out)
    main(["schedule", "--schedule", f"file:{table}", *more, "--json"])
    assert json.loads(capsys.readouterr().out) == written
    main(["simulate", "--schedule", f"file:{table}", *more, "--json"])
    assert json.loads(capsys.readouterr().out)["format"] == "evenpipe.simulation/1"


def test_a_table_for_torch(tmp_path: Path) -> None:
    table = tmp_path / "T.csv"
    flags = ["--stages", "2", "--micro-batches", "2", "--out", str(table), "--format", "torch-csv", "--json"]
    main(["schedule", "--schedule", "zb-h1", *flags])
    assert table.read_text() == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


def test_what_is_too_large_to_draw_is_not_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    main(["schedule", "--schedule", "gpipe", "--stages", "4", "--micro-batches", "4000"])
    said = capsys.readouterr().out
    assert "32,000 actions are too many to draw; --out S.txt writes them" in said
    assert "F0" not in said


@pytest.mark.parametrize("command", ["schedule", "simulate"])
@pytest.mark.parametrize("options", [BPIPE, INTERLEAVED, [*TWO_BW, "--batches", "4"]])
def test_picture_and_trace(
    command: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, trace = tmp_path / "p.png", tmp_path / "t.json"
    json_of(capsys, command, *options, "--picture", str(picture), "--trace", str(trace))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["format"] == "evenpipe.trace/1"


def test_text_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *BPIPE]) == 0
    text = capsys.readouterr().out
    assert "stage 3" in text
    assert "A1@0" in text
    assert "bound: 3" in text
    assert main(["simulate", *BPIPE]) == 0
    text = capsys.readouterr().out
    assert "makespan 33 ms, bubble 27.3%" in text
    assert main(["schedule", *TWO_BW]) == 0
    text = capsys.readouterr().out
    assert "2bw, 4 stages, 4 micro-batches × 3 batches" in text
    assert "U update" in text
    assert main(["simulate", *KFKB, "--bpipe"]) == 0
    assert "kfkb with BPipe, k=2, 2 stages, 5 micro-batches" in capsys.readouterr().out


def test_as_a_module_without_torch(tmp_path: Path) -> None:
    """Looking at a schedule must not take the seconds that torch takes to import."""
    code = f"""
import sys
from evenpipe.cli.main import main
main({["schedule", *BPIPE, "--json", "--picture", str(tmp_path / "p.png")]!r})
main({["simulate", *BPIPE, "--json"]!r})
assert "torch" not in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    shown = subprocess.run([sys.executable, "-m", "evenpipe", "--version"], check=True, capture_output=True, text=True)
    assert shown.stdout == f"evenpipe {__version__}\n"


def test_a_reader_that_stops_early_is_no_error() -> None:
    """``evenpipe simulate ... --json | head`` once ended in a traceback."""
    command = [sys.executable, "-m", "evenpipe", "simulate", *BPIPE, "--micro-batches", "2000", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 0


@pytest.mark.parametrize("command", [[], ["schedule"], ["simulate"]])
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "usage: evenpipe" in text
    for name in command:
        assert "--batches N" in text
        assert {"schedule": "evenpipe.schedule/1", "simulate": "evenpipe.simulation/1"}[name] in text


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_fits_into_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert not [line for line in capsys.readouterr().out.splitlines() if len(line) > 80]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--one-queue",), "on devices: makespan 33 ms (one queue, synchronised nowhere)"),
        (("--synchronised", "everything"), "(many queues, synchronised at every call, as CUDA_LAUNCH_BLOCKING=1 does)"),
    ],
)
def test_what_an_environment_costs_is_told(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    arguments = "simulate", "--schedule", "kfkb", "--group-size", "2", "--stages", "4", "--micro-batches", "8"
    assert main([*arguments, *options]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    document = json_of(capsys, *arguments, *options)
    assert document["on_devices_ms"] >= document["makespan_ms"]
    assert "on_devices_ms" not in json_of(capsys, *arguments)


def test_schedules_is_schedule_in_every_command() -> None:
    commands = Parser("evenpipe").add_subparsers()
    for name in COMMANDS:
        import_module(f"evenpipe.cli.{name}").add_to(commands)
    both = ("--schedule", "--schedules")
    having = {name: parser._option_string_actions for name, parser in commands.choices.items()}
    found = {name: [of.get(one) for one in both] for name, of in having.items() if any(one in of for one in both)}
    assert {"schedule", "simulate", "estimate", "plan", "recipe", "partition", "train"} <= set(found)
    for name, (one, other) in found.items():
        assert one is not None, name
        assert other is not None, name
        assert (one.dest, one.type) == (other.dest, other.type), name
        assert other not in commands.choices[name].options(), name


def test_schedules_is_parsed_as_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--stages", "2", "--micro-batches", "2")
    said = json_of(capsys, "schedule", "--schedules", "zb-h1", *words)
    assert said == json_of(capsys, "schedule", "--schedule", "zb-h1", *words)


_SMALL = (sys.executable, "-m", "evenpipe", "schedule", "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2")


@pytest.mark.parametrize("target", ["-", "/dev/stdout"])
def test_an_output_on_standard_output_is_there_alone(target: str, tmp_path: Path) -> None:
    """Also where that is a file, which stays the same one; the text goes to standard error for `-`."""
    out = tmp_path / "out"
    with out.open("wb") as file:
        done = subprocess.run([*_SMALL, "--out", target], stdout=file, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert out.read_text().startswith("format=evenpipe.schedule/1 ")
    assert out.read_text().endswith("\nF0 B0 F1 B1\n")
    assert "peak live" in done.stderr


def test_two_documents_on_standard_output_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*_SMALL[3:], "--out", "-", "--json"])
    assert "--out -: --json is written to standard output too" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="finds a process's children in /proc")
@pytest.mark.parametrize(
    ("words", "later"),
    [
        (("schedule", "--schedule", "1f1b", "--stages", "8", "--micro-batches", "100000", "--json"), 0.0),
        pytest.param(
            ("plan", "--model", "llama3-405b", "--cluster", "128x8-h100", "--global-batch-size", "1024"),
            0.0,
            marks=pytest.mark.gate,
        ),
        pytest.param(
            ("partition", "--model", "gpt2-large", "--stages", "4", "--micro-batch-size", "8"),
            0.0,
            marks=pytest.mark.gate,
        ),
        (("train", "--stages", "2", "--layers", "2", "--iterations", "100000"), 0.0),
        pytest.param(
            ("train", "--stages", "2", "--layers", "2", "--iterations", "100000"), 1.0, marks=pytest.mark.gate
        ),
    ],
    ids=["schedule", "plan", "partition", "train", "train, while processes start"],
)
def test_ctrl_c_is_one_line(words: tuple[str, ...], later: float, tmp_path: Path) -> None:
    """The whole group of processes gets it, as from a terminal: amid the work, or, where that is in other processes,
    `later` seconds after the second one is there."""
    command = [sys.executable, "-m", "evenpipe", *words]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=tmp_path,
        # What a shell starts in the background ignores it, as do its children, unless they are told not to.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    there = Path(f"/proc/{process.pid}")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (
        len((there / f"task/{process.pid}/children").read_text().split()) == 2
        if words[0] == "train"
        else int((there / "stat").read_text().rpartition(")")[2].split()[11]) >= os.sysconf("SC_CLK_TCK")
    ):
        time.sleep(0.02)
    time.sleep(later)
    os.killpg(process.pid, signal.SIGINT)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, out, err) == (130, "", f"evenpipe {words[0]}: stopped by SIGINT\n")


def test_the_readme_names_the_commands_that_have_an_option() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    commands = Parser("evenpipe").add_subparsers()
    for name in COMMANDS:
        import_module(f"evenpipe.cli.{name}").add_to(commands)

    def having(option: str) -> set[str]:
        return {name for name, parser in commands.choices.items() if option in parser._option_string_actions}

    said = r"^All take `--json` \(`run` with `--estimate`\); (.*?) take `--picture P.png`.*?; (.*?) take `--trace"
    sentence = re.search(said, readme, re.MULTILINE | re.DOTALL)
    assert sentence is not None
    with_picture, with_trace = (set(re.findall(r"`([a-z]+)`", part)) for part in sentence.groups())
    assert set(COMMANDS) == having("--json")
    assert having("--picture") == with_picture
    assert having("--trace") == with_trace
