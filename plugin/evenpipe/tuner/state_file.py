"""A tuner's state in a small JSON file beside what a framework saves, under the settings that it was found with."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from evenpipe.report.files import write_atomically

__all__ = ["read_state", "save_with"]

_FORMAT: Final = "evenpipe.script_tuner/1"


def save_with(
    write: Callable[[], Any],
    state: Any,
    settings: Mapping[str, Any],
    beside: Path,
    inside: Path,
    log: Callable[[str], None],
) -> Any:
    """Let `write` save a checkpoint once `state` is on disk; what it returns.

    What says which checkpoint is the latest moves on within `write`, or later, so a checkpoint that can be loaded has
    both. Frameworks want their own folder empty, so the state stays at `beside` until they are done, then it moves to
    `inside`. A state that cannot be written costs a tuning anew, as `log` is told.
    """
    content = {"format": _FORMAT, "settings": _as_json(settings), "state": state}
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(beside, json.dumps(content))
    except OSError as error:
        log(f"{beside}: {error.strerror}: a resumed run will tune anew")
        return write()
    result = write()
    # It is found beside, too.
    with contextlib.suppress(OSError):
        inside.parent.mkdir(parents=True, exist_ok=True)
        os.replace(beside, inside)
    return result


def read_state(paths: Iterable[Path], settings: Mapping[str, Any], limit_bytes: int) -> dict[str, Any] | None:
    """The state in the first of `paths` saved under these settings and this limit; None where there is none."""
    wanted = {"format": _FORMAT, "settings": _as_json(settings)}
    for path in paths:
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if wanted.items() <= content.items() and content["state"]["limit_bytes"] == limit_bytes:
            state: dict[str, Any] = content["state"]
            return state
    return None


def _as_json(settings: Mapping[str, Any]) -> Any:
    """As JSON gives them back: tuples are lists there."""
    return json.loads(json.dumps(settings))
