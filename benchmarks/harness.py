"""What all benchmarks share: their flags, the processes they measure in, and the document they end with."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cells import cells
from checkout import commit
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["Benchmark", "Tick", "positive", "prepare_to_fork", "progress_bar", "run_in_processes"]

Tick = Callable[[], None]
"""Says that one more unit of work is done."""


def positive(text: str) -> int:
    """The value of a flag that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


class Benchmark:
    """One run of a benchmark script; make it before the work, since it notes how busy the machine is."""

    def __init__(self, name: str, description: str, repeats: int) -> None:
        self.name = name
        self.parser = argparse.ArgumentParser(description=description.partition("\n")[0])
        self.parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
        self.parser.add_argument(
            "--repeats", type=positive, default=repeats, help=f"times that each variant is measured (default {repeats})"
        )
        self._load_before = os.getloadavg()[0]
        self._versions = versions()  # now: the checkout may be another by the end

    def report(self, settings: dict[str, Any], results: list[dict[str, Any]], table: Table | Group) -> None:
        """Print the document `evenpipe.benchmark/1`, or `table`, as --json says."""
        machine = {
            "platform": platform.platform(),
            "processor": processor(),
            "cpus": os.cpu_count(),
            # Of one minute: before the benchmark, and at its end, its own load included.
            "load_before": round(self._load_before, 2),
            "load_after": round(os.getloadavg()[0], 2),
        }
        if self.parser.parse_args().json:
            today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
            origin = {"command": command(), "date": today, "versions": self._versions, "machine": machine}
            document = {"format": "evenpipe.benchmark/1", "name": self.name, **origin}
            print(json.dumps(document | {"settings": settings, "results": results, "tables": cells(table)}))
            return
        console = Console() if sys.stdout.isatty() else Console(width=160)
        console.print(table)
        about = (f"{name.replace('_', ' ')} {value}" for name, value in (self._versions | machine).items())
        console.print(", ".join(about))


def command() -> str:
    """What started this script, as one would type it again for people."""
    script = Path(sys.argv[0]).resolve()
    flags = [Path(flag).name if Path(flag).is_absolute() else flag for flag in sys.argv[1:] if flag != "--json"]
    return shlex.join(["python", f"benchmarks/{script.name}", *flags])


def versions() -> dict[str, str]:
    """Of Python, of what is measured and of what it is measured with, as far as it is installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if commit():
        found["evenpipe"] = commit()
    for name in ("megatron-core", "deepspeed"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def processor() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Tick]:
    """A bar on standard error that a call of the result moves on by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def prepare_to_fork() -> None:
    """Before processes of Megatron's are forked that train on CPU."""
    # CPU mode is refused where CUDA is available.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    # What is imported need not be searched for cycles in each process.
    gc.collect()
    gc.freeze()


def run_in_processes(
    world: int, function: Callable[..., Any], *arguments: Any, tick: Tick, enter: Callable[[int], None] | None = None
) -> Any:
    """Call `function(rank, *arguments, tick)` in `world` forked processes that form a gloo world; rank 0's result.

    Each calls `enter(rank)` before anything else. Only rank 0's ticks count. Raises what torch.multiprocessing raises
    when a process fails; no process is left then.
    """
    queue = mp.get_context("fork").SimpleQueue()
    result = None
    # They meet over a file: a store with threads in this process could be forked in the middle of something.
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        entry = (world, folder, queue, function, arguments, enter)
        processes = mp.start_processes(_entry, entry, nprocs=world, join=False, daemon=True, start_method="fork")
        ended = False
        try:
            while not ended:
                ended = processes.join(timeout=0.1)
                while not queue.empty():
                    kind, value = queue.get()
                    if kind == "tick":
                        tick()
                    else:
                        result = value
        finally:
            for process in processes.processes:
                process.kill()
    return result


def _entry(
    rank: int,
    world: int,
    folder: str,
    queue: Any,
    function: Callable[..., Any],
    arguments: Any,
    enter: Callable[[int], None] | None,
) -> None:
    if enter is not None:
        enter(rank)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(folder, "store")), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

    def tick() -> None:
        if rank == 0:
            queue.put(("tick", None))

    result = function(rank, *arguments, tick)
    if rank == 0:
        queue.put(("result", result))
    dist.barrier()
    dist.destroy_process_group()
