"""Ranks of script jobs, forked from a process that has imported torch: most of a short job's time is that import.

A rank is an interpreter that runs `python -m evenpipe run ...` and ends as any does; Megatron-LM and EvenPipe are
imported by each rank itself. What torchrun's agent does for a job is done here: one rank that fails ends the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

__all__ = ["RankServer"]

_ROOT: Final = Path(__file__).parents[2]
_PRELOADED: Final = (  # the packages of others that Megatron's imports are made of
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("torch.distributed.launcher.api", "torch.optim", "torch.utils.data", "torch._inductor.config", "numpy", "einops"),
    *("torch.distributed.tensor.parallel", "torch.distributed.checkpoint.state_dict_saver", "packaging.version"),
    *("torch.utils.tensorboard", "pydantic", "yaml", "setuptools", "psutil", "jinja2"),
    *("transformers.models.auto.tokenization_auto", "transformers.utils.chat_template_utils"),
)
_GRACE_SECONDS: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1


class RankServer:
    """The process that ranks are forked from; one job at a time."""

    def __init__(self, bytecode: Path) -> None:
        """`bytecode` is where compiled modules are kept, as a checkout stays as it is."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONPYCACHEPREFIX": str(bytecode),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.megatron_lm.ranks import serve; serve()"],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(
        self,
        checkout: Path,
        arguments: Sequence[str],
        ranks: int,
        environment: Mapping[str, str],
        output: Path,
        timeout: float,
    ) -> int | None:
        """The exit status of `python -m evenpipe ARGUMENTS` in `checkout` by so many ranks; None after `timeout` (s).

        `environment` is what differs from this process's; what the ranks print goes to the file `output`.
        """
        job = {"checkout": str(checkout), "arguments": arguments, "ranks": ranks, "output": str(output)}
        job["environment"] = dict(environment)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({**job, "timeout": timeout}), file=self._process.stdin, flush=True)
        status: int | None = json.loads(self._process.stdout.readline())
        return status

    def close(self) -> None:
        """End it, and the ranks that still run."""
        self._process.kill()
        self._process.wait()


def serve() -> None:
    """Run jobs, until there are no more; returns in each rank when that has nothing left to do."""
    _end_with_parent()
    for name in _PRELOADED:
        import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        # Kept by this process, so that nobody else takes the port before the ranks meet there.
        server = socket.create_server(("localhost", 0))
        started = {}
        for place in _places(job["ranks"], server.getsockname()[1]):
            pid = os.fork()
            if pid == 0:
                server.close()
                return _rank(job, place)
            started[pid] = place["RANK"]
        print(json.dumps(_met(server, started, job["timeout"])), flush=True)
    return None


def _met(server: socket.socket, started: dict[int, str], timeout: float) -> int | None:
    """The same as `_status`, of ranks that meet at `server`; its threads are over when the next are forked."""
    from torch.distributed import TCPStore

    port, descriptor = server.getsockname()[1], server.detach()
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    status = _status(started, timeout)
    del store
    return status


def _end_with_parent() -> None:
    """So that nothing is left of tests that are killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _places(ranks: int, port: int) -> list[dict[str, str]]:
    """What torchrun says to each rank in its environment."""
    every = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    every |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_WORLD_SIZE": ranks, "TORCHELASTIC_USE_AGENT_STORE": True}
    own = [{"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank} for rank in range(ranks)]
    return [{name: str(value) for name, value in (every | one).items()} for one in own]


def _rank(job: Mapping[str, Any], place: Mapping[str, str]) -> None:
    os.setsid()
    _end_with_parent()
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(job["checkout"])
    os.environ |= place | job["environment"]
    # The checkout's own megatron.core, not one that happens to be installed, is what is tested.
    os.environ["PYTHONPATH"] = os.pathsep.join((job["checkout"], os.environ["PYTHONPATH"]))
    sys.path.insert(1, job["checkout"])
    sys.argv = ["evenpipe", *job["arguments"]]
    runpy.run_module("evenpipe", run_name="__main__", alter_sys=True)


def _status(started: dict[int, str], timeout: float) -> int | None:
    """The first status that is not 0, or 0; None if the ranks did not end in time. All have ended then."""
    deadline, status, late = time.monotonic() + timeout, 0, False
    while started:
        pid, ended = os.waitpid(-1, os.WNOHANG)
        if pid in started:
            rank, found = started.pop(pid), os.waitstatus_to_exitcode(ended)
            if found and not status:
                status = found
                print(f"rank {rank} ended with status {found}", file=sys.stderr)
                _signal(started, signal.SIGTERM)
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        elif time.monotonic() > deadline:
            late = late or not status
            _signal(started, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.02)
    return None if late else status


def _signal(processes: Mapping[int, str], number: signal.Signals) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
