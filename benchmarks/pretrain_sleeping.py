"""Run the pretrain_gpt.py in the current folder, unmodified, with stages that sleep (see sleeping_stages.py).

FORWARD_MS in the environment is how long a forward takes; a backward takes twice as long.
"""

from __future__ import annotations

import functools
import os
import runpy
from collections.abc import Callable
from typing import Any

from emulation import Accelerator
from megatron.training import training
from sleeping_stages import follow_waits, slow_down


def sleeping(original: Callable[..., list[Any]], accelerator: Accelerator) -> Callable[..., list[Any]]:
    """Megatron's `get_model`, whose chunks then sleep."""

    @functools.wraps(original)
    def get_model(*args: Any, **kwargs: Any) -> list[Any]:
        chunks = original(*args, **kwargs)
        for chunk in chunks:
            slow_down(chunk.module, accelerator)
        return chunks

    return get_model


if __name__ == "__main__":
    forward_ms = float(os.environ["FORWARD_MS"])
    accelerator = Accelerator(forward_ms, 2 * forward_ms)
    follow_waits(accelerator)
    training.get_model = sleeping(training.get_model, accelerator)
    runpy.run_path("pretrain_gpt.py", run_name="__main__")
