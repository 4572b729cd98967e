"""Ends a job that cannot go on, with one line, from all of its processes."""

from __future__ import annotations

import os
import sys
import time
from typing import Final, NoReturn

__all__ = ["end_job"]

# Whoever ends first has torchrun end the others: rank 0, which speaks, must not be among those.
_LET_RANK_0_SPEAK_SECONDS: Final = 3.0


def end_job(message: str) -> NoReturn:
    """End this process with status 2; rank 0 prints `message`, as one line, on standard error.

    Every process of the job has to come to the same end: meant for what all of them find alike.
    """
    if os.environ.get("RANK", "0") == "0":
        print(f"evenpipe: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    else:
        time.sleep(_LET_RANK_0_SPEAK_SECONDS)
    raise SystemExit(2)
