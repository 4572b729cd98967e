"""Write a file as a whole or not at all, and tell a damaged file from a whole one."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final

__all__ = [
    "DamagedFile",
    "check_seal",
    "check_writable",
    "is_special",
    "lacks_room",
    "move_durably",
    "sealed",
    "sha256_of",
    "write_atomically",
    "write_durably",
]

_STDOUT: Final = 1


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Put ``content`` (text as UTF-8) at ``path``; a reader sees the old file or the new one, never a part.

    The new file has the old one's mode and owner. Three targets are opened and written instead, without that promise:
    a target that is no regular file (a device, a FIFO, ``/dev/stdout``), one that is this process's standard output,
    and one with several hard links, all of which then have the new content.
    Raises OSError when it cannot be written; then nothing is left beside it.
    """
    data = content.encode() if isinstance(content, str) else content
    there = _status(path)
    if there is not None and (opened := _to_open(path, there)) is not None:
        sys.stdout.flush()
        with open(opened, "wb", closefd=not isinstance(opened, int)) as file:
            file.write(data)
        return
    if there is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    target = Path(path).resolve()
    temporary = target.with_name(f".evenpipe-{secrets.token_hex(8)}")
    try:
        temporary.write_bytes(data)
        if there is not None:
            # Only root may give a file away; to everybody else it stays their own.
            with contextlib.suppress(PermissionError):
                os.chown(temporary, there.st_uid, there.st_gid)
            temporary.chmod(stat.S_IMODE(there.st_mode))
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def lacks_room(error: BaseException) -> bool:
    """Return whether a write has failed for want of space, on the device or within the user's share of it."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_special(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` exists as neither a regular file nor a folder: a device, a FIFO or standard output."""
    there = _status(path)
    return (
        there is not None
        and not stat.S_ISDIR(there.st_mode)
        and (not stat.S_ISREG(there.st_mode) or _is_standard_output(there))
    )


def _to_open(path: str | os.PathLike[str], there: os.stat_result) -> str | int | None:
    """Return what to open for writing in place, a path or a descriptor; None for what a new file can replace."""
    if _is_standard_output(there):
        return _STDOUT
    return os.fspath(path) if not stat.S_ISREG(there.st_mode) or there.st_nlink > 1 else None


def _is_standard_output(there: os.stat_result) -> bool:
    try:
        return os.path.samestat(there, os.fstat(_STDOUT))
    except OSError:  # it is closed
        return False


def _status(path: str | os.PathLike[str]) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def write_durably(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Put what ``fill`` writes at ``path``: safe on disk as a whole when this returns, or not there.

    Its folder is made. Raises OSError, which names the path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    try:
        with temporary.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        move_durably(temporary, path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def move_durably(path: Path, to: Path) -> None:
    """Give a file or a folder another name, in a folder that is made; it is safe on disk when this returns."""
    to.parent.mkdir(parents=True, exist_ok=True)
    os.replace(path, to)
    for folder in {path.parent, to.parent}:
        _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """A name is safe only when the folder that has it is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(path: Path) -> str | None:
    """Return why this process could not write a file at ``path``, and what to do, in one line; None if it could."""
    there = _status(path)
    if there is not None and stat.S_ISDIR(there.st_mode):
        return "is a folder: name a file in it"
    if there is not None and not os.access(path, os.W_OK):
        return "cannot be written (Permission denied): name another"
    if there is not None and _to_open(path, there) is not None:
        return None
    folder = path.resolve().parent
    if not folder.is_dir():
        return f"there is no folder {folder}: make it, or name another"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"nothing can be written to the folder {folder} ({error.strerror}): name another"


_MARK: Final = b"\nevenpipe.sha256 "
_SEAL_BYTES: Final = len(_MARK) + hashlib.sha256().digest_size * 2
_READ_BYTES: Final = 1 << 20


class DamagedFile(ValueError):
    """A file does not have the digest that it was written with."""


def sha256_of(path: Path, size: int | None = None) -> str:
    """Return the SHA-256 of a file's first `size` bytes (None: of all), in hexadecimal digits. Raises OSError."""
    digest = hashlib.sha256()
    left = path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while left and (read := file.read(min(left, _READ_BYTES))):
            digest.update(read)
            left -= len(read)
    return digest.hexdigest()


def sealed(fill: Callable[[BinaryIO], object]) -> Callable[[BinaryIO], object]:
    """Return what writes as `fill` does, and then the digest of all that: readers of ZIP files pass over it."""

    def fill_and_seal(file: BinaryIO) -> None:
        written = _Hashing(file)
        fill(written)  # type: ignore[arg-type]
        file.write(_MARK + written.digest.hexdigest().encode())

    return fill_and_seal


def check_seal(path: Path) -> None:
    """Check that a file ends in the digest of what is before it. Raises DamagedFile where it does not, and OSError."""
    size = path.stat().st_size - _SEAL_BYTES
    with path.open("rb") as file:
        file.seek(max(size, 0))
        seal = file.read()
    if not seal.startswith(_MARK):
        raise DamagedFile(f"{path} is damaged, or of another format: it does not end in its digest")
    if seal.removeprefix(_MARK) != sha256_of(path, size).encode():
        raise DamagedFile(f"{path} is damaged: it is not what its digest was made of")


class _Hashing:
    """Passes on what is written to a file, and has its digest."""

    def __init__(self, file: BinaryIO) -> None:
        self.digest = hashlib.sha256()
        self._file = file

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()
