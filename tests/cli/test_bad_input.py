"""Bad input: status 2 and one line that names the argument and the remedy; with --json also as an object."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from evenpipe.cli.main import main
from tests.refusals import refusal

GOOD = {"--schedule": "1f1b", "--stages": "4", "--micro-batches": "8"}


def options(changes: dict[str, str], *flags: str) -> list[str]:
    return [word for option in (GOOD | changes).items() for word in option] + list(flags)


def test_what_would_steer_a_terminal_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "estimate", "--model", "a\x1b[31m\nb×", "--cluster", "1x8-h100", "--global-batch-size", "8")
    assert r"--model a\x1b[31m b×: unknown among models" in said


BAD: list[tuple[dict[str, str], list[str], list[str]]] = [
    ({"--schedule": "1fb1"}, [], ["--schedule 1fb1", "did you mean 1f1b?"]),
    ({"--schedule": "zigzag"}, [], ["--schedule zigzag", "1f1b, gpipe, "]),
    ({"--stages": "0"}, [], ["--stages 0", "at least 1"]),
    ({"--micro-batches": "-3"}, [], ["--micro-batches -3", "at least 1"]),
    ({"--stages": "99999999999999999999"}, [], ["--stages 99999999999999999999", "at most 1,000,000 can be"]),
    ({"--micro-batches": "9999999"}, [], ["--micro-batches 9999999", "at most 1,000,000 can be", "give less"]),
    ({"--stages": "four"}, [], ["--stages", "'four'"]),
    ({"--schedule": "gpipe", "--chunks": "2"}, [], ["--chunks 2", "one model chunk", "interleaved"]),
    ({"--chunks": "0"}, [], ["--chunks 0", "at least 1"]),
    ({"--schedule": "interleaved"}, [], ["--chunks 1", "at least 2"]),
    ({"--schedule": "interleaved", "--chunks": "2", "--micro-batches": "6"}, [], ["--micro-batches 6", "multiple"]),
    ({"--schedule": "gpipe"}, ["--bpipe"], ["--bpipe", "nothing to balance"]),
    ({"--stages": "1"}, ["--bpipe"], ["--bpipe", "at least 2 stages"]),
    ({"--schedule": "2bw", "--stages": "12"}, [], ["--micro-batches 8", "stages (12)", "use 12 or more"]),
    ({"--schedule": "2bw", "--batches": "0"}, [], ["--batches 0", "at least 1"]),
    ({"--schedule": "2bw", "--chunks": "2"}, [], ["--chunks 2", "one model chunk"]),
    ({"--schedule": "2bw", "--stages": "1"}, ["--bpipe"], ["--bpipe", "at least 2 stages"]),
    ({"--batches": "2"}, [], ["--batches 2", "1f1b flushes after every batch", "schedule 2bw"]),
    ({"--group-size": "2"}, [], ["--group-size 2", "1f1b groups no micro-batches", "schedule kfkb"]),
    ({"--schedule": "kfkb", "--group-size": "0"}, [], ["--group-size 0", "at least 1"]),
    ({"--schedule": "kfkb", "--group-size": "auto"}, [], ["--group-size", "auto is chosen in a run"]),
    ({"--schedule": "kfkb", "--chunks": "2"}, [], ["--chunks 2", "one model chunk"]),
    ({"--picture": "/nowhere/p.png"}, [], ["--picture", "no folder /nowhere"]),
    ({"--picture": "p.svg"}, [], ["--picture", ".png"]),
    ({"--trace": "/"}, [], ["--trace", "is a folder"]),
    ({"--schedule": "file:/dev/zero"}, [], ["--schedule file:/dev/zero", "more than 67,108,864 characters"]),
    ({"--schedule": "file:/nowhere/S.txt"}, [], ["--schedule file:/nowhere/S.txt", "No such file", "--out"]),
    ({}, ["--colour"], ["--colour", "--help"]),
]


@pytest.mark.parametrize("command", ["schedule", "simulate"])
def test_schedules_and_outputs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for changes, flags, said in BAD:
        line = refusal(capsys, command, *options(changes, *flags))
        assert [part for part in said if part not in line] == [], line


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--forward-ms", "1,2,3", "3 times for 4 stages; give one, or one for each stage"),
        ("--backward-ms", "1,2,3,4,5", "5 times for 4 stages"),
        ("--forward-ms", "-1", "at least 0"),
        ("--backward-ms", "nan", "finite"),
        ("--forward-ms", "1,,2,3", "is no number"),
        ("--link-ms", "inf", "finite"),
        ("--transfer-ms", "soon", "'soon' is no number"),
    ],
)
def test_times(option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "simulate", *options({option: value}))
    assert option in line
    assert said in line


def test_a_transfer_time_needs_transfers(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "simulate", *options({"--host-gbps": "1"}))
    assert "--host-gbps 1: nothing is swapped: add --swap-mib, or leave it out" in line
    line = refusal(capsys, "simulate", *options({"--swap-mib": "1"}), "--one-queue")
    assert "--swap-mib: the model of devices has no swaps in it: leave --one-queue and --synchronised out" in line
    line = refusal(capsys, "simulate", *options({"--transfer-ms": "1"}))
    assert "--transfer-ms 1: nothing is evicted or loaded: add --bpipe, or leave it out" in line


@pytest.mark.parametrize("command", ["plan", "candidates", "estimate", "recipe"])
def test_a_batch_has_a_limit(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Beyond it a search would not end while anybody waits."""
    line = refusal(capsys, command, "--global-batch-size", "100001")
    assert "100001 is more than 100,000: give less" in line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["frobnicate"], "frobnicate: unknown command, choose one of schedule, simulate, "),
        (["schedule"], "--schedule"),
        (["simulate", "--schedule", "1f1b", "--micro-batches", "4"], "--stages"),
    ],
)
def test_incomplete_command_lines(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, *argv)
    assert said in line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["pla"], "evenpipe: error: pla: unknown command, did you mean plan?"),
        (["--jsn", "plan"], "evenpipe: error: --jsn: unknown option: a command's own go after it"),
        (["plan", "--modle", "x"], "evenpipe plan: error: --modle: unknown option, did you mean --model?"),
        (["plan", "--modle=x"], "evenpipe plan: error: --modle: unknown option, did you mean --model?"),
        (["schedule", "1f1b"], "evenpipe schedule: error: 1f1b: unexpected argument"),
        (["run", "--cpuu", "x.py"], "evenpipe run: error: --cpuu: unknown option, did you mean --cpu?"),
        (["run", "--num-layers", "4", "x.py"], "--num-layers: unknown option: the script's own go after it"),
        (["partition", "--megatron", "--num-layers", "4"], "Megatron's go after --, with --megatron"),
        (["recipe", "gtp"], "evenpipe recipe: error: gtp: unknown, did you mean gpt?"),
        (["estimate", "--precision", "bf61"], "--precision bf61: unknown, did you mean bf16?"),
        (["costs", "T.json", "--placement", "zigzag"], "--placement zigzag: unknown, choose one of straight, "),
    ],
)
def test_an_unknown_word_is_answered_by_its_command(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option of a sub-command was once refused by ``evenpipe`` itself, or the missing ones were named instead."""
    assert said in refusal(capsys, *argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "--modle", "x", "--json"],
        ["estimate", "--json", "--model", "gpt3-69b", "--cluster", "1x8-h100", "--global-batch-size", "8"],
        ["schedule", *options({"--stages": "0"}), "--json"],
        ["run", "--estimate", "--json", "/nowhere/pretrain_gpt.py"],
    ],
)
def test_with_json_an_error_is_an_object(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refusal(capsys, *argv)


def test_json_among_the_flags_of_a_script_is_the_script_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "/nowhere/train.py", "--json"])
    assert capsys.readouterr().out == ""


def test_json_for_a_reader_that_has_gone() -> None:
    command = f"{sys.executable} -m evenpipe plan --json --model x | true"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("argv", "missing"),
    [
        ([], "evenpipe: error: missing COMMAND (see evenpipe --help)\n"),
        (["plan", "--model", "gpt3-96b"], "missing --cluster NAME, --global-batch-size G (see evenpipe plan --help)\n"),
        (["report"], "missing RUN.json, --html OUT.html (see evenpipe report --help)\n"),
        (["run"], "missing SCRIPT (see evenpipe run --help)\n"),
    ],
)
def test_only_what_is_missing_is_named(argv: list[str], missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *argv).endswith(missing)


def test_a_disk_error_while_writing_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    line = refusal(capsys, "schedule", *options({"--trace": str(tmp_path / "t.json")}, "--json"))
    assert "--trace" in line
    assert "No space left on device" in line


WITHOUT_FILES = """
import resource, socket, sys
from evenpipe.cli import main, schedule
def out_of_files(*_):
    resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))
    [socket.socket() for _ in range(5)]
schedule.console_of = out_of_files
sys.exit(main.main(sys.argv[1:]))
"""


def test_only_a_write_of_output_is_said_to_be_one() -> None:
    command = ["schedule", *options({})]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "evenpipe", *command], stdout=full, stderr=PIPE, text=True)
    said = "cannot write the output: No space left on device; free some space, or write elsewhere"
    assert (done.returncode, done.stderr) == (2, f"evenpipe schedule: error: {said}\n")
    done = subprocess.run([sys.executable, "-c", WITHOUT_FILES, *command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "evenpipe schedule: error: Too many open files\n")
