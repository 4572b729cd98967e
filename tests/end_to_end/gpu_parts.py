"""Carries out parts of `make gpu` on CPU places; their ranks are forked and share one process's imports.

Each line of standard input is RANKS NAME, and is answered by the entry of that part, in JSON.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
import warnings
from contextlib import redirect_stderr, suppress
from importlib import import_module
from pathlib import Path

from benchmarks.gpu import parts, rank, registry

__all__ = ["COMMAND"]

COMMAND = (sys.executable, "-W", "ignore", "-m", "tests.end_to_end.gpu_parts")


class _Forked:
    """A forked rank, with the part of `subprocess.Popen` that `parts` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self._status is None and (ended := os.waitpid(self.pid, options))[0]:
            self._status = os.waitstatus_to_exitcode(ended[1])
        return self._status


def _start(part: registry.Part, place: str, number: int, count: int, folder: Path) -> _Forked:
    log = os.open(folder / f"rank-{number}.log", os.O_CREAT | os.O_WRONLY)
    pid = os.fork()
    with suppress(OSError):  # in both, so that neither can be too early
        os.setpgid(pid, pid)
    if pid:
        os.close(log)
        return _Forked(pid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {name: value for name, value in part.environment if name != "TORCH_CUDA_SANITIZER"}
    sys.argv = ["rank", part.module, part.argument, place, str(number), str(count), str(folder)]
    rank._main()
    sys.stderr.flush()
    os._exit(0)


def _serve() -> None:
    folders = (str(registry.ROOT), str(registry.ROOT / "plugin"), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    # Ranks unblock it, and take what has come in the meantime. Before the imports, for threads.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # megatron-core warns of every optional package that is missing.
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for name in ("evenpipe.train.plain", "evenpipe.megatron.train_engine.engine"):
            import_module(name)
    for module in dict.fromkeys(part.module for part in registry.PARTS):
        import_module(f"benchmarks.gpu.{module}")
    gc.freeze()
    parts._start = _start  # type: ignore[assignment]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        ranks, name = line.rstrip("\n").split(" ", 1)
        [part] = (part for part in registry.PARTS if part.name == name)
        entry = parts.carry_out(part, "cpu", int(ranks), 800, lambda said: print(said, file=sys.stderr))
        print(json.dumps(entry), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
