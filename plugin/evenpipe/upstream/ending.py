"""Ends a job that cannot go on, with one line, from all of its processes."""

from __future__ import annotations

import os
import sys
import time
from typing import Final, NoReturn

from evenpipe.upstream.errors import UpstreamError
from evenpipe.upstream.patches import PatchSet

__all__ = ["apply_or_end", "end_job"]

# Whoever ends first has torchrun end the others of its node, which would have said the same: so rank 0 speaks at once,
# the first process of another node if that was not its end too, and the rest only if they alone found something.
_FIRST_OF_A_NODE_SECONDS: Final = 10.0
_ANY_OTHER_SECONDS: Final = 15.0


def end_job(message: str) -> NoReturn:
    """End this process with status 2, after `message`, as one line, on standard error."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(_FIRST_OF_A_NODE_SECONDS if os.environ.get("LOCAL_RANK", "0") == "0" else _ANY_OTHER_SECONDS)
        message = f"{message} (found by rank {rank})"
    print(f"evenpipe: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def apply_or_end(patches: PatchSet) -> None:
    """Apply `patches`; what does not fit ends the job."""
    try:
        patches.apply()
    except UpstreamError as error:
        end_job(str(error))
