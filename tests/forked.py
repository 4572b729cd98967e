"""Starts the ranks of a script as torchrun does, out of one process that has imported what all of them import.

python forked.py RANKS MODULE,.. SCRIPT [ARGUMENT ..]; the status is that of the first rank that failed.
"""

from __future__ import annotations

import gc
import os
import runpy
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.job_server import Done

__all__ = ["command", "run"]


def command(ranks: int, modules: str, script: str | Path, *arguments: str) -> list[str]:
    """`script` on so many ranks; `modules`, with commas between them, are imported once."""
    return [sys.executable, "-W", "ignore", __file__, str(ranks), modules, str(script), *arguments]


def run(ranks: int, modules: str, script: str | Path, *arguments: str | Path) -> Done:
    """The same, carried out, and forked from the server that has imported `modules` for others too."""
    from tests.job_server import run_script

    return run_script(modules, Path(__file__), str(ranks), modules, script, *arguments)


def _start(ranks: int, modules: str, script: str) -> int:
    gc.disable()  # until a rank begins: a quarter of the imports' time would be collections that find nothing
    for name in modules.split(","):
        import_module(name)
    sys.path[0] = str(Path(script).parent)
    gc.collect()
    gc.freeze()
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        started = []
        for rank in range(ranks):
            process = os.fork()
            if not process:
                gc.enable()
                _become(rank, ranks, port)
                # Up to the interpreter's end, and all that happens there, as if it had been started for the script.
                runpy.run_path(script, run_name="__main__")
                return 0
            started.append(process)
        statuses = _serve(server, started)
    return next((abs(status) for status in statuses if status), 0)


def _become(rank: int, ranks: int, port: int) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _serve(server: socket.socket, processes: list[int]) -> list[int]:
    """How the ranks ended; until then they meet here. The store's threads are begun when there is nothing to fork."""
    from torch.distributed import TCPStore

    port, descriptor = server.getsockname()[1], server.detach()
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    del store
    return statuses


if __name__ == "__main__":
    count, imported, path = sys.argv[1:4]
    del sys.argv[:3]
    sys.exit(_start(int(count), imported, path))
