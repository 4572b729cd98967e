"""Ranks of script jobs, forked from a process that has imported what the script does: half of a short job is imports.

A rank runs `python -m evenpipe run --cpu SCRIPT ...`, or with other options, from its first line to the interpreter's
end, and does anew all that this does but imports, and the reading of their sources. Unlike one that a user starts, it
shares with the job's other ranks, and with jobs before it, the hashes of strings; what it spawns is forked too
(`spawned.py`). A script that is not one of the checkout's, or whose imports end in an error, has ranks that import
Megatron-LM and EvenPipe themselves. What torchrun's agent does for a job is done here: one rank that fails ends the
others.

Jobs of torchrun itself are in `test_vendored.py` (with every release), `test_failures.py` and `test_two_bw.py`,
where a forked run goes on from what such a job has saved, to the bits of one that did not stop.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import inspect
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from tests.megatron_lm.spawned import spawn_by_fork

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
_THREADS: Final = Path("/proc/self/task")  # of Linux; elsewhere they are not counted


class _Job(NamedTuple):
    checkout: str
    script: str
    flags: Sequence[str]
    ranks: int
    environment: Mapping[str, str]
    output: str
    timeout: float
    options: Sequence[str]


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
        script: str,
        flags: Sequence[str],
        ranks: int,
        environment: Mapping[str, str],
        output: Path,
        timeout: float,
        options: Sequence[str] = ("--cpu",),
    ) -> int | None:
        """The status of `python -m evenpipe run OPTIONS SCRIPT FLAGS` by so many ranks; None after `timeout` (s).

        `environment` is what differs from this process's; what the ranks print goes to the file `output`.
        """
        job = _Job(str(checkout), script, flags, ranks, dict(environment), str(output), timeout, options)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        status: int | None = json.loads(self._process.stdout.readline())
        return status

    def ranks(self) -> list[int]:
        """The processes of the job that runs, those of imports that are made again and again too (Linux)."""
        own = _children(self._process.pid)
        return [rank for template in own for rank in _children(template)] or own

    def close(self) -> None:
        """End it, and the ranks that still run."""
        self._process.kill()
        self._process.wait()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def serve() -> None:
    """Run jobs, until there are no more; a rank ends within this."""
    _end_with_parent()
    gc.disable()  # until a rank begins: a quarter of the imports' time would be collections that find nothing
    for name in _PRELOADED:
        import_module(name)
    _settle()
    templates: dict[tuple[str, str], Connection | None] = {}
    for line in sys.stdin:
        job = _Job(*json.loads(line))
        template = None
        if Path(job.script).parent == Path():
            key = job.checkout, job.script
            if key not in templates:
                templates[key] = _template(*key)
            template = templates[key]
        print(json.dumps(_run(job) if template is None else _run_there(template, job)), flush=True)


def _template(checkout: str, script: str) -> Connection | None:
    """A process that runs jobs of `script`, with its imports made; None if it has ended before they were."""
    here, there = multiprocessing.Pipe()
    if os.fork() == 0:
        here.close()
        _end_with_parent()
        _import_what_it_imports(checkout, script)
        _settle()
        there.send(None)
        for job in _jobs(there):
            there.send(_run(job))
        os._exit(0)
    there.close()
    try:
        here.recv()
    except EOFError:
        return None
    return here


def _jobs(there: Connection) -> Iterator[_Job]:
    with contextlib.suppress(EOFError):
        while True:
            yield there.recv()


def _run_there(template: Connection, job: _Job) -> int | None:
    template.send(job)
    status: int | None = template.recv()
    return status


def _import_what_it_imports(checkout: str, script: str) -> None:
    """As a spawned child of the script's would, silently; environment and words are left to each rank."""
    environment, words, output = dict(os.environ), sys.argv, [os.dup(stream) for stream in (1, 2)]
    _say_to(os.devnull)
    _go_to(checkout)
    sys.argv = [script]
    os.environ["EVENPIPE_CPU"] = "1"
    import_module("evenpipe.megatron").install()
    runpy.run_path(script, run_name="__mp_main__")
    # Newer releases read, three times a rank, what classes say of their fields; it is what they said.
    inspect.getsource = functools.cache(inspect.getsource)
    import_module("megatron.training.arguments").add_megatron_arguments(argparse.ArgumentParser())
    for stream, before in zip((1, 2), output, strict=True):
        os.dup2(before, stream)
    sys.argv = words
    os.environ.clear()
    os.environ |= environment


def _settle() -> None:
    """Before ranks are forked: their collections need not look through, and so copy, what has been imported."""
    gc.collect()
    gc.freeze()


def _run(job: _Job) -> int | None:
    """Its status, as `_status` has it, by ranks that are forked from this process."""
    assert not _THREADS.exists() or len(os.listdir(_THREADS)) == 1, "ranks would lack a thread of this process"
    # Kept by this process, so that nobody else takes the port before the ranks meet there.
    server = socket.create_server(("localhost", 0))
    started = {}
    for place in _places(job.ranks, server.getsockname()[1]):
        pid = os.fork()
        if pid == 0:
            server.close()
            _rank(job, place)
        started[pid] = place["RANK"]
    return _met(server, started, job.timeout)


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


def _rank(job: _Job, place: Mapping[str, str]) -> NoReturn:
    os.setsid()
    _end_with_parent()
    _say_to(job.output)
    os.environ |= place | job.environment
    _go_to(job.checkout)
    gc.enable()
    if "--save" in job.flags:
        spawn_by_fork()
    sys.argv = ["evenpipe", "run", *job.options, job.script, *job.flags]
    runpy.run_module("evenpipe", run_name="__main__", alter_sys=True)
    sys.exit()


def _say_to(path: str) -> None:
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _go_to(checkout: str) -> None:
    """The checkout's own megatron.core, not one that happens to be installed, is what is tested."""
    os.chdir(checkout)
    os.environ["PYTHONPATH"] = os.pathsep.join((checkout, os.environ["PYTHONPATH"]))
    if checkout not in sys.path:
        sys.path.insert(1, checkout)


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
