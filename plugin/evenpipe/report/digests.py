"""Digests by which a damaged file is told from a whole one: of a whole file, or at a file's own end over all before."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final

__all__ = ["DamagedFile", "check_seal", "sealed", "sha256_of"]

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
