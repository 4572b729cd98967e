"""Ends a job that cannot go on, from all of its processes, with what was wrong."""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn

from evenpipe.upstream.installed import too_old_torch
from evenpipe.upstream.patches import PatchSet
from evenpipe.upstream.symbols import UpstreamError

__all__ = ["apply_or_end", "end_job", "end_where_torch_is_too_old", "end_with_the_first_error"]

# Whoever ends first has torchrun end the others of its node, which would have said the same: so rank 0 speaks at once,
# the first process of another node if that was not its end too, and the rest only if they alone found something.
_FIRST_OF_A_NODE_SECONDS: Final = 10.0
_ANY_OTHER_SECONDS: Final = 15.0

_LONGEST_END_SECONDS: Final = 8.0
_PEER_SECONDS: Final = 5.0  # the peer is to have ended, and DeepSpeed's launcher looks once a second
_STDERR: Final = 2


def end_job(message: str) -> NoReturn:
    """End this process with status 2, after `message`, as one line, on standard error."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(_FIRST_OF_A_NODE_SECONDS if os.environ.get("LOCAL_RANK", "0") == "0" else _ANY_OTHER_SECONDS)
        message = f"{message} (found by rank {rank})"
    print(f"evenpipe: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def apply_or_end(patches: PatchSet) -> None:
    """Apply `patches`, unless another instance of them has been; what does not fit ends the job."""
    try:
        patches.apply_once()
    except UpstreamError as error:
        end_job(str(error))


def end_where_torch_is_too_old() -> None:
    """End the job, with one line, where the torch that it would import is older than what EvenPipe works with."""
    if (said := too_old_torch()) is not None:
        end_job(said)


def end_with_the_first_error(cause: Callable[[BaseException], BaseException | None] = lambda error: None) -> None:
    """From here on an uncaught error ends this process soon, and after the error of another process that caused it.

    `cause` gives what is to be said in its place, if there is anything.
    """
    if getattr(sys.excepthook, "func", None) is not _end_soon:
        sys.excepthook = functools.partial(_end_soon, sys.excepthook, cause)


def _end_soon(tell: Callable[..., Any], cause: Callable[[BaseException], BaseException | None], *error: Any) -> None:
    """Tell of an uncaught error as ever, and see to it that the process ends, as its peers wait for it.

    Links and process groups can wait for peers when they are torn down, where no Python runs any more. An error that is
    one line, for the user, is told as such.
    """
    if (found := cause(error[1])) is not None:
        error = (type(found), found, None)
    # By number: torch.distributed, which calls this hook, has put a buffer in the place of sys.stderr.
    faulthandler.dump_traceback_later(_LONGEST_END_SECONDS, exit=True, file=_STDERR)
    if "by peer" in str(error[1]):
        # gloo's "Connection closed by peer": the peer, which failed first, is to be heard and seen first.
        time.sleep(_PEER_SECONDS)
    if getattr(error[1], "one_line", False):
        print(f"evenpipe: error: {error[1]}", file=sys.stderr, flush=True)
    else:
        tell(*error)
