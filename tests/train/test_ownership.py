"""Who may save to a folder: one run, until its process has ended."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenpipe.train.ownership import Disturbed, owned

MINE, THEIRS = "a" * 32, "b" * 32
OWNS = """
import sys, time
from pathlib import Path
from evenpipe.train.ownership import owned
with owned(Path(sys.argv[1]), sys.argv[2], print, patience=0):
    print("owned", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that owns the folder."""
    command = [sys.executable, "-c", OWNS, str(tmp_path), THEIRS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "owned\n"
        yield process
        process.kill()


def test_the_second_is_told_who_owns_it(tmp_path: Path, other: "subprocess.Popen[str]") -> None:
    other.send_signal(signal.SIGSTOP)  # one that stands still owns it, too
    notes: list[str] = []
    with pytest.raises(Disturbed) as refusal, owned(tmp_path, MINE, notes.append, patience=0.2):
        pytest.fail("it does not own it")
    who = f"run bbbbbbbb (process {other.pid} on {os.uname().nodename}) saves there"
    assert str(refusal.value) == f"{tmp_path}: {who}: stop it first, or save elsewhere"
    assert notes == [f"{tmp_path}: {who}: waiting up to 0.2 s for it to end"]


@pytest.mark.parametrize("reaped", [True, False])
def test_one_that_was_killed_is_followed_at_once(reaped: bool, tmp_path: Path, other: "subprocess.Popen[str]") -> None:
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
    with owned(tmp_path, MINE, pytest.fail, patience=0):
        assert MINE in (tmp_path / "owner.json").read_text()
    assert (tmp_path / "owner.json").read_text() == ""


def test_an_owner_that_ends_within_the_wait_is_followed(tmp_path: Path, other: "subprocess.Popen[str]") -> None:
    threading.Timer(0.2, other.kill).start()
    with owned(tmp_path, MINE, lambda line: None, patience=30):
        assert MINE in (tmp_path / "owner.json").read_text()


def test_half_a_name_keeps_nobody_out(tmp_path: Path) -> None:
    (tmp_path / "owner.json").write_bytes(b'{"run": "even')
    with owned(tmp_path, MINE, pytest.fail, patience=0):
        second = owned(tmp_path, THEIRS, lambda line: None, patience=0)
        with pytest.raises(Disturbed, match="run aaaaaaaa"), second:
            pytest.fail("it does not own it")
