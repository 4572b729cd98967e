"""What a script that starts processes of its own leaves for the test that started it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.job_server import run_script

__all__ = ["MEGATRON", "reports"]

_TORCH = "torch.distributed,torch.multiprocessing,torch.optim,evenpipe.runtime.executor,evenpipe.schedule"
MEGATRON = f"{_TORCH},torch._dynamo,evenpipe.megatron.train_engine.engine,evenpipe.megatron.schedule"
"""What a script of Megatron's imports, unless it changes how Megatron is imported."""


def reports(script: Path, folder: Path, processes: int, *arguments: str, imports: str = _TORCH) -> list[Any]:
    """What each process of `script` wrote down in `folder`, in `rank-0.json` and so on.

    `imports` are the modules that a process has before it begins: what is told while they are imported comes too early.
    """
    done = run_script(imports, script, folder, *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{number}.json").read_text()) for number in range(processes)]
