"""One run at a time saves to a folder: it keeps DIR/owner.json locked as long as it runs, and its name in it.

The system takes the lock back when its holder dies (flock, which NFS has, too).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

__all__ = ["OWNER_FILE", "Disturbed", "owned"]

OWNER_FILE: Final = "owner.json"
_PATIENCE_SECONDS: Final = 20.0
_LOOK_SECONDS: Final = 0.1
_NO_LOCKS_HERE: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Disturbed(RuntimeError):
    """Another run saves to the folder. The message is one line: who, and what to do."""


@contextmanager
def owned(folder: Path, run: str, note: Callable[[str], None], patience: float = _PATIENCE_SECONDS) -> Iterator[None]:
    """Own `folder` inside, as `run`. `note` shows the user a line where another owner is waited for.

    Raises Disturbed when that is still there after `patience` seconds, and OSError.
    """
    with (folder / OWNER_FILE).open("a+", encoding="utf-8") as file:
        _lock(file, folder, note, patience)
        file.truncate(0)
        json.dump({"run": run, "host": socket.gethostname(), "pid": os.getpid()}, file)
        file.flush()
        yield
        file.truncate(0)


def _lock(file: IO[str], folder: Path, note: Callable[[str], None], patience: float) -> None:
    deadline, noted = time.monotonic() + patience, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            who = _owner(file)
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise
            note(f"{folder}: has no locks ({error.strerror}): see that no other run saves there")
            return
        if time.monotonic() >= deadline:
            raise Disturbed(f"{folder}: {who} saves there: stop it first, or save elsewhere")
        if not noted:
            note(f"{folder}: {who} saves there: waiting up to {patience:g} s for it to end")
        noted = True
        time.sleep(_LOOK_SECONDS)


def _owner(file: IO[str]) -> str:
    file.seek(0)
    try:
        found = json.load(file)
        return f"run {found['run'][:8]} (process {found['pid']} on {found['host']})"
    except (ValueError, LookupError, TypeError):
        return "another run"
