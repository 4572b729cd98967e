"""The tiny transformer with a stage that dies on the way: train_broken.py HOW CASES.json OUT.json."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import train_tiny  # the launcher puts this folder on the path
from torch import Tensor

_FORWARDS = 25  # of the blocks of stage 2, two a micro-batch: in the second batch


class Breaking(train_tiny.Block):
    """Works for a while."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        Breaking.forwards += 1
        if os.environ["RANK"] == "2" and Breaking.forwards == _FORWARDS:
            print(f"FAILS AT {time.time()}", flush=True)
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[1] == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            raise RuntimeError("stage two is broken")
        return super().forward(x)


if __name__ == "__main__":
    train_tiny.Block = Breaking
    timeout = timedelta(seconds=20 if sys.argv[1] == "stop" else 1800)
    cases, out = map(Path, sys.argv[2:])
    train_tiny.work(lambda given: train_tiny.train(train_tiny.Case(**given)), cases, out, timeout)
