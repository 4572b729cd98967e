"""Tables of every width: all cells can be read, at any width of the terminal, on any stream."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.cli.main import main
from evenpipe.cli.shown import console_of, in_runs, print_prose, print_table
from tests.end_to_end.test_readme import MODEL

SCHEDULE = [sys.executable, "-m", "evenpipe", "schedule", "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2"]
HEADS = ("stage", "weights", "total", "why")
NUMBERS = st.floats(0, 1e12).map("{:,.2f}".format)
WORDS = st.lists(st.text("abc", min_size=1, max_size=12), max_size=20).map(" ".join)


def printed(width: int, rows: list[tuple[str, ...]], optional: tuple[str, ...] = ()) -> str:
    console = console_of()
    console.width = width
    with console.capture() as capture:
        print_table(console, HEADS, rows, "GiB", optional)
    return capture.get()


@given(st.integers(20, 200), st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, WORDS), max_size=3))
def test_nothing_is_cut_off(width: int, rows: list[tuple[str, ...]]) -> None:
    text = printed(width, rows)
    assert "…" not in text
    for *numbers, words in rows:
        assert all(number in text.split() for number in numbers)
        assert all(word in text.split() for word in words.split())
    if "stage: " not in text:  # a table, not a line for each cell
        assert max(map(len, text.splitlines())) <= width


def test_narrow_means_fewer_columns_then_a_line_for_each_cell() -> None:
    rows = [("0", "5.73", "77.30", ""), ("1", "5.57", "76.04", "")]
    assert printed(80, rows).splitlines()[0].split() == ["stage", "weights", "total", "why"]
    narrower = printed(20, rows, optional=("weights",)).splitlines()
    assert narrower[0].split() == ["stage", "total", "why"]
    assert narrower[-2:] == ["GiB; not shown in 20", "columns: weights"]
    narrowest = printed(10, rows, optional=("weights",)).splitlines()
    assert narrowest[:4] == ["stage: 0", "  weights: 5.73", "  total: 77.30", "stage: 1"]
    assert narrowest[-1] == "GiB"


def test_sentences_are_wrapped_between_words_and_names_stay_whole() -> None:
    console = console_of()
    console.width = 30
    with console.capture() as capture:
        print_prose(
            console, "GiB, of 79.35; the rest of an iteration\n  zbv: slower, see /a/path/that/is/longer/than/a/line"
        )
    assert capture.get().splitlines() == [
        "GiB, of 79.35; the rest of an",
        "iteration",
        "  zbv: slower, see",
        "    /a/path/that/is/longer/than/a/line",
    ]


def test_stages_that_are_alike_are_counted() -> None:
    assert in_runs(["70.1", "69.0", "69.0", "69.0", "66.2", "70.1"]) == "70.1 69.0×3 66.2 70.1"


def test_without_a_terminal_nothing_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    rows = [("0", "1.00", "2.00", "a " * 45)] * 2
    with (console := console_of()).capture() as capture:
        print_table(console, HEADS, rows)
    assert len(capture.get().splitlines()) == 4


def on_a_terminal(**environment: str) -> str:
    """Return what `evenpipe schedule` writes to a terminal of 70 columns."""
    ours, theirs = pty.openpty()
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    subprocess.run(SCHEDULE, stdout=theirs, env={**plain, "TERM": "xterm", "COLUMNS": "70", **environment}, check=True)
    text = os.read(ours, 2**16).decode()
    os.close(theirs)
    os.close(ours)
    return text


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_text_is_plain_where_that_is_asked_for(environment: dict[str, str]) -> None:
    assert "\x1b[" in on_a_terminal()
    assert "\x1b" not in on_a_terminal(**environment)


def test_a_stream_of_ascii_gets_ascii() -> None:
    """A file of another encoding once ended a command in an error."""
    plan = ["plan", "--model", "gpt3-13b", "--cluster", "1x8-a100-80gb", "--global-batch-size", "32"]
    command = [sys.executable, "-m", "evenpipe", *plan, "--schedule", "1f1b"]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "(x: so many stages in a row)" in done.stdout.decode("ascii")


GPT = "--model gpt3-13b --cluster 1x8-a100-80gb --global-batch-size 32"


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize(
    "command",
    [
        f"estimate {GPT} --stages 2 --tensor-parallel 4",
        f"plan {GPT} --schedule 1f1b,kfkb --stages 2",
        f"fit --keep t,p,c,b,schedule,gradients,moments -- torchrun pretrain_gpt.py {' '.join(MODEL)}",
        "simulate --schedule 1f1b --stages 4 --micro-batches 8 --bpipe --one-queue",
        "schedule --schedule interleaved --stages 4 --micro-batches 8 --chunks 2",
        "simulate --schedule zbv --stages 4 --micro-batches 8 --chunks 2",
    ],
    ids=lambda command: command.split()[0] if isinstance(command, str) else command,
)
def test_every_line_fits_but_commands_and_single_words(
    command: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    main(command.split())
    text = capsys.readouterr().out
    wide = [line for line in text.splitlines() if len(line) > width and not line.startswith("evenpipe ")]
    assert [line for line in wide if " " in line.strip()] == []
