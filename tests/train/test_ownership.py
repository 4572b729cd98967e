"""Who may save to a folder: one run, until its process has ended or, on another machine, its lease has."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenpipe.train.ownership import Disturbed, acquire, holding, owned, release

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


def moved(folder: Path) -> None:
    """The owner of the folder is on another machine from now on."""
    path = folder / "owner.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "elsewhere", "host": "node7"}))


def test_the_second_is_told_who_owns_it(tmp_path: Path, other: "subprocess.Popen[str]") -> None:
    notes: list[str] = []
    with pytest.raises(Disturbed) as refusal:
        acquire(tmp_path, MINE, notes.append, patience=0.2)
    who = f"run bbbbbbbb (process {other.pid} on {os.uname().nodename}) saves there"
    assert str(refusal.value) == f"{tmp_path}: {who}: stop it first, or save elsewhere"
    assert notes == [f"{tmp_path}: {who}: waiting up to 0.2 s for it to end"]


@pytest.mark.parametrize("reaped", [True, False])
def test_one_that_was_killed_here_is_followed_at_once(
    reaped: bool, tmp_path: Path, other: "subprocess.Popen[str]"
) -> None:
    other.kill()
    if reaped:
        other.wait()
    else:
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    acquire(tmp_path, MINE, pytest.fail, patience=0)
    with holding(tmp_path, MINE):
        pass


def test_another_process_with_its_number_is_not_taken_for_it(tmp_path: Path) -> None:
    acquire(tmp_path, THEIRS, pytest.fail)
    path = tmp_path / "owner.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"started": "1"}))
    acquire(tmp_path, MINE, pytest.fail, patience=0)


def test_one_that_is_stopped_here_still_owns_it(tmp_path: Path, other: "subprocess.Popen[str]") -> None:
    other.send_signal(signal.SIGSTOP)
    with pytest.raises(Disturbed, match="saves there"):
        acquire(tmp_path, MINE, lambda line: None, patience=0.3)


def test_one_elsewhere_that_is_silent_for_a_lease_is_followed(tmp_path: Path) -> None:
    acquire(tmp_path, THEIRS, pytest.fail)
    moved(tmp_path)
    start = time.monotonic()
    acquire(tmp_path, MINE, lambda line: None, patience=0.5)
    assert time.monotonic() - start >= 0.5


def test_one_elsewhere_that_renews_its_lease_is_not(tmp_path: Path) -> None:
    acquire(tmp_path, THEIRS, pytest.fail)
    moved(tmp_path)
    renew = threading.Timer(0.2, lambda: os.utime(tmp_path / "owner.json", (0, 0)))  # its clock is another
    renew.start()
    with pytest.raises(Disturbed, match=r"\(process \d+ on node7\) saves there"):
        acquire(tmp_path, MINE, lambda line: None, patience=0.6)
    renew.join()


def test_an_owner_that_ends_within_the_wait_is_followed(tmp_path: Path) -> None:
    acquire(tmp_path, THEIRS, pytest.fail)
    leave = threading.Timer(0.2, release, (tmp_path, THEIRS))
    leave.start()
    acquire(tmp_path, MINE, lambda line: None, patience=30)
    leave.join()


def test_half_an_owner_is_waited_for_and_then_followed(tmp_path: Path) -> None:
    (tmp_path / "owner.json").write_bytes(b'{"format": "even')
    acquire(tmp_path, MINE, lambda line: None, patience=0.3)
    with holding(tmp_path, MINE):
        pass


def test_a_run_that_was_followed_changes_nothing_any_more(tmp_path: Path) -> None:
    with owned(tmp_path, THEIRS, pytest.fail):
        moved(tmp_path)
        acquire(tmp_path, MINE, lambda line: None, patience=0.3)
        with pytest.raises(Disturbed, match=r"run aaaaaaaa .* has taken the folder over"), holding(tmp_path, THEIRS):
            pytest.fail("it does not own it")
    with holding(tmp_path, MINE):
        pass


def test_of_many_that_come_at_once_one_owns_it(tmp_path: Path) -> None:
    acquire(tmp_path, THEIRS, pytest.fail)
    moved(tmp_path)
    got: list[str] = []

    def come(run: str) -> None:
        try:
            acquire(tmp_path, run, lambda line: None, patience=0.3)
        except Disturbed:
            return
        got.append(run)

    threads = [threading.Thread(target=come, args=(f"{number:032x}",)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    with holding(tmp_path, got[0]):
        pass
