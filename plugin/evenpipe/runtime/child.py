"""Asks a module in a process of its own, so that what it imports and patches stays out of the caller's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final

__all__ = ["ChildFailed", "answer_of"]

_WITHOUT_GPU: Final = {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


class ChildFailed(RuntimeError):
    """The message is the last line of what the child said on standard error, `details` is all of it."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details


def answer_of(module: str, question: object) -> Any:
    """The JSON on the last line that `python -m module` prints, with `question` as JSON on its standard input.

    It sees no GPU. Raises ChildFailed if it ends with an error.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module],
        input=json.dumps(question),
        env={**os.environ, **_WITHOUT_GPU},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ChildFailed(lines[-1], done.stderr)
    return json.loads(done.stdout.splitlines()[-1])
