"""Runs scripts in processes forked from one that has made their imports, which are half of a short job.

The server runs one script at a time, and ends with the process that asks it. A script sees its own folder, environment,
arguments and output, as if an interpreter had been started for it, but not the modules' first import.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["HUGGING_FACE", "Done", "run_script"]

#: What scripts of transformers' models import.
HUGGING_FACE = "accelerate,transformers.models.mixtral.modeling_mixtral,torch._dynamo,torch.optim"

_ROOT = Path(__file__).parents[1]
_LONGEST_SECONDS = 800


class Done(NamedTuple):
    """How a script ended, and what it and its processes wrote."""

    returncode: int
    stdout: str
    stderr: str


def run_script(
    imports: str, script: Path, *arguments: str | Path, folder: Path | None = None, environment: str = ""
) -> Done:
    """Run `script` after the modules `imports` (commas between); `environment`: NAME=VALUE while they are imported."""
    with tempfile.TemporaryDirectory() as kept:
        outputs = [Path(kept, name) for name in ("stdout", "stderr")]
        status = _server(imports, environment).run(
            {
                "script": str(script),
                "arguments": [str(argument) for argument in arguments],
                "folder": str(folder or Path.cwd()),
                "outputs": [str(output) for output in outputs],
                "environment": dict(os.environ),
            }
        )
        return Done(status, *(output.read_text() for output in outputs))


class _Server:
    def __init__(self, imports: str, environment: Iterable[str]) -> None:
        paths = filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))
        added = dict(pair.split("=") for pair in environment) | {"PYTHONPATH": os.pathsep.join(paths)}
        self._added = added
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, *imports.split(",")],
            env={**os.environ, **added},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, job: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job["environment"] |= self._added
        print(json.dumps(job), file=self._process.stdin, flush=True)
        status = self._process.stdout.readline()
        assert status, f"the server of scripts ended with status {self._process.wait()}"
        return int(status)


@functools.cache
def _server(imports: str, environment: str) -> _Server:
    return _Server(imports, environment.split())


def _serve(modules: Iterable[str]) -> dict[str, Any] | None:
    """Run scripts until nobody asks for more. In a forked process, return the script that it is to run."""
    gc.disable()  # until a script begins: a quarter of the imports' time would be collections that find nothing
    for name in modules:
        import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        process = os.fork()
        if not process:
            return json.loads(line)  # type: ignore[no-any-return]
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    return None


def _become(job: dict[str, Any]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, output in zip((1, 2), job["outputs"], strict=True):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ |= job["environment"]
    os.chdir(job["folder"])
    sys.argv = [job["script"], *job["arguments"]]
    sys.path[0] = str(Path(job["script"]).parent)
    gc.enable()
    signal.alarm(_LONGEST_SECONDS)
    runpy.run_path(job["script"], run_name="__main__")


if __name__ == "__main__":
    given = _serve(sys.argv[1:])
    if given is not None:
        _become(given)
