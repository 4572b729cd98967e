"""What training processes report to their parent, as lines in files: it survives any death of the writer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["Entry", "Failure", "Iteration", "JournalReader", "Note", "Saved", "append"]


class Iteration(NamedTuple):
    """One finished iteration of case `case`, both counted from 0; written by the process that knows the loss."""

    case: int
    iteration: int
    loss: float
    ms: float


class Failure(NamedTuple):
    """An error in one process. `clock` (seconds, monotonic) is the same clock in all processes of a machine.

    `of_options`: it is one that options make, and a line that names the flag.
    """

    clock: float
    stage: int
    position: str
    error: str
    traceback: str
    of_options: bool = False

    def __str__(self) -> str:
        return f"stage {self.stage} failed at {self.position}: {self.error}"


class Saved(NamedTuple):
    """A checkpoint is complete, in `folder`."""

    folder: str


class Note(NamedTuple):
    """Something that the user should know, in one line."""

    text: str


Entry = Iteration | Failure | Saved | Note
_KINDS: Final[dict[str, type[Entry]]] = {kind.__name__.lower(): kind for kind in (Iteration, Failure, Saved, Note)}


def append(folder: Path, rank: int, entry: Entry) -> None:
    """Add `entry` to what process `rank` has reported so far."""
    with (folder / f"{rank}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": type(entry).__name__.lower(), **entry._asdict()}) + "\n")


class JournalReader:
    """Reads what has been reported since the last look."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def new_entries(self) -> Iterator[Entry]:
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open(encoding="utf-8") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            complete = text[: text.rfind("\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(complete.encode())
            for line in complete.splitlines():
                yield _entry(json.loads(line))


def _entry(fields: dict[str, Any]) -> Entry:
    return _KINDS[fields.pop("kind")](**fields)
