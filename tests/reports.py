"""What a script that starts processes of its own leaves for the test that started it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["reports"]


def reports(script: Path, folder: Path, processes: int, *arguments: str) -> list[Any]:
    """What each process of `script` wrote down in `folder`, in `rank-0.json` and so on."""
    command = [sys.executable, "-W", "ignore", script, folder, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{number}.json").read_text()) for number in range(processes)]
