"""What a rank spawns, forked from what the rank was before its first line: a new interpreter would import all again.

All that multiprocessing has a spawned child do is done, from `spawn_main` on: the script is run once more, too.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing.util
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

__all__ = ["spawn_by_fork"]

_MOST_BYTES, _MOST_DESCRIPTORS = 1 << 20, 64


def spawn_by_fork() -> None:
    """Have the first child that this process is going to spawn be one that is forked now."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        here.close()
        _become(there)
    there.close()
    spawn, waiting = multiprocessing.util.spawnv_passfds, [pid]

    def spawnv_passfds(path: Any, words: Sequence[Any], descriptors: Sequence[int]) -> int:
        said = [os.fsdecode(word) for word in words]
        if said[-1] != "--multiprocessing-fork" or not waiting:
            return spawn(path, words, descriptors)
        content = {"code": said[-2], "descriptors": descriptors, "environment": dict(os.environ)}
        socket.send_fds(here, [json.dumps(content).encode()], descriptors)
        here.close()
        return waiting.pop()

    multiprocessing.util.spawnv_passfds = spawnv_passfds


def _become(there: socket.socket) -> NoReturn:
    """The child that is asked for; nothing, if its parent ends without asking."""
    content, received, _, _ = socket.recv_fds(there, _MOST_BYTES, _MOST_DESCRIPTORS)
    if not content:
        os._exit(0)
    given = json.loads(content)
    os.environ.clear()
    os.environ |= given["environment"]
    # Out of the way first: a number that is wanted can be that of another one received.
    apart = [fcntl.fcntl(one, fcntl.F_DUPFD, max(given["descriptors"]) + 1) for one in received]
    for descriptor, wanted in zip(apart, given["descriptors"], strict=True):
        os.dup2(descriptor, wanted)
    for descriptor in {*apart, *received} - {*given["descriptors"]}:
        os.close(descriptor)
    sys.argv = ["-c", "--multiprocessing-fork"]
    exec(given["code"], {"__name__": "__main__"})
    sys.exit()
