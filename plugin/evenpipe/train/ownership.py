"""One run at a time saves to a folder: who it is stands in DIR/owner.json, as long as it runs.

The file is changed in place, under a lock that the system takes back when its holder dies (flock, which NFS has, too).
An owner on the same machine is looked for by its process. One elsewhere renews the file's time; it counts as gone once
the time has stood still for a lease, as the looker's own clock measures it, so that hosts' clocks may differ.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

__all__ = ["OWNER_FILE", "Disturbed", "acquire", "holding", "owned", "release"]

OWNER_FILE: Final = "owner.json"
#: How long an owner on another machine may be silent.
LEASE_SECONDS: Final = 20.0
_RENEW_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.1
_NO_LOCKS_HERE: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
#: Where there are no locks, how long two that write at once wait before they read who came last.
_SETTLE_SECONDS: Final = 1.0
_MOST_BYTES: Final = 4096


class Disturbed(RuntimeError):
    """Another run saves to the folder. The message is one line: who, and what to do."""


class _Owner(BaseModel):
    """The process that starts a run. `machine`: where process numbers mean the same; `started`: its first tick."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["evenpipe.owner/1"] = "evenpipe.owner/1"
    run: str
    host: str
    machine: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"run {self.run[:8]} (process {self.pid} on {self.host})"

    @property
    def is_gone(self) -> bool | None:
        """Return whether its process has ended; None where only the lease can tell."""
        if self.machine != _machine():
            return None
        return _started(self.pid) != self.started


@contextmanager
def owned(folder: Path, run: str, note: Callable[[str], None], patience: float = LEASE_SECONDS) -> Iterator[None]:
    """Own `folder` inside, as `run`. `note` shows the user a line where another owner is waited for.

    Raises Disturbed when that is still there after `patience` seconds, and OSError.
    """
    acquire(folder, run, note, patience)
    ended = threading.Event()
    thread = threading.Thread(target=_renew, args=(folder, run, ended), name="evenpipe-owner", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        release(folder, run)


def acquire(folder: Path, run: str, note: Callable[[str], None], patience: float = LEASE_SECONDS) -> None:
    """Become the owner of `folder` once nobody else is. Raises what `owned` does."""
    deadline = time.monotonic() + patience
    first: tuple[_Owner | None, int] | None = None
    while True:
        with _locked(folder, patience) as (file, locks):
            owner, renewed = _read(file), os.fstat(file).st_mtime_ns
            mark, late = (owner, renewed), time.monotonic() >= deadline
            silent = first in (None, mark)
            empty = os.fstat(file).st_size == 0
            # Text that cannot be read is being written, or was left by one that died writing: the lease tells.
            gone = None if owner is None else owner.is_gone
            mine = owner is not None and owner.run == run
            free = empty or mine or gone is True or (gone is None and late and silent)
            if free:
                _write(file, run)
        if free and (locks or _came_last(folder, run)):
            return
        if not free and late:
            who = "a run that cannot be told" if owner is None else str(owner)
            raise Disturbed(f"{folder}: {who} saves there: stop it first, or save elsewhere")
        if first is None and not free:
            first = mark
            note(f"{folder}: {owner or 'another run'} saves there: waiting up to {patience:g} s for it to end")
        time.sleep(_LOOK_SECONDS)


def release(folder: Path, run: str) -> None:
    """Leave `folder` to others, if it is owned by `run`. Never raises: a lease ends by itself."""
    try:
        with _locked(folder, _RENEW_SECONDS) as (file, _):
            owner = _read(file)
            if owner is not None and owner.run == run:
                os.ftruncate(file, 0)
    except (OSError, Disturbed):
        pass


@contextmanager
def holding(folder: Path, run: str) -> Iterator[None]:
    """Change `folder` inside, while nobody can take it over. Raises Disturbed if `run` does not own it, and OSError."""
    with _locked(folder, LEASE_SECONDS) as (file, _):
        owner = _read(file)
        if owner is None or owner.run != run:
            other = "another run" if owner is None else str(owner)
            raise Disturbed(f"{folder}: {other} has taken the folder over: end one of them, or save elsewhere")
        yield


@contextmanager
def _locked(folder: Path, patience: float) -> Iterator[tuple[int, bool]]:
    """Give the owner's file, opened anew, which NFS needs to see others' changes; and whether it is locked."""
    path = folder / OWNER_FILE
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield file, _lock(file, path, patience)
    finally:
        os.close(file)


def _lock(file: int, path: Path, patience: float) -> bool:
    """Return whether there are locks where the file is."""
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise Disturbed(f"{path}: another process keeps it locked: end that, or save elsewhere") from None
            time.sleep(_LOOK_SECONDS / 10)
        except OSError as error:
            if error.errno in _NO_LOCKS_HERE:
                return False
            raise


def _read(file: int) -> _Owner | None:
    """Return the owner that is written there; None if nobody is, or what is there cannot be read."""
    try:
        return _Owner.model_validate_json(os.pread(file, _MOST_BYTES, 0))
    except ValidationError:
        return None


def _write(file: int, run: str) -> None:
    pid = os.getpid()
    owner = _Owner(run=run, host=socket.gethostname(), machine=_machine(), pid=pid, started=_started(pid))
    os.ftruncate(file, 0)
    os.pwrite(file, owner.model_dump_json().encode(), 0)
    os.fsync(file)


def _came_last(folder: Path, run: str) -> bool:
    time.sleep(_SETTLE_SECONDS)
    with _locked(folder, LEASE_SECONDS) as (file, _):
        owner = _read(file)
    return owner is not None and owner.run == run


def _renew(folder: Path, run: str, ended: threading.Event) -> None:
    """Show others that the run is there, until it has ended or is no longer the owner."""
    while not ended.wait(_RENEW_SECONDS):
        try:
            file = os.open(folder / OWNER_FILE, os.O_RDWR)
        except OSError:
            continue
        try:
            owner = _read(file)
            if owner is not None and owner.run != run:
                return
            os.utime(file)
        except OSError:
            continue
        finally:
            os.close(file)


def _machine() -> str:
    """Name the boot of a kernel and the space of process numbers, which containers have of their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str:
    """Return the tick at which a process has started; empty where it has ended."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *fields = line.rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "unknown"
