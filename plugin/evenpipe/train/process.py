"""The life of one training process, as torchrun's agent starts it: environment, cases one by one, failures reported."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from evenpipe.runtime.heartbeat import silent_peer
from evenpipe.train.engine import engine_module
from evenpipe.train.journal import Failure, Iteration, Note, Saved, append
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.recorder import FailureContext
from evenpipe.train.result import RunResult
from evenpipe.train.run import RunEvents, run_case
from evenpipe.train.stopping import STOPPING, StopRequest

__all__ = ["train_cases"]

# The agent polls every 0.1 s. A process that dies without a word (out of memory, say) breaks its peers' connections at
# once; they leave it this long to be noticed first.
_NOTICE_SECONDS: Final = 0.5


def train_cases(cases: tuple[TrainOptions, ...], device_type: str, journal: str, run: str) -> list[RunResult]:
    """Run `cases` one after the other, each in a torch.distributed world of its own; results on rank 0 only.

    With --save, a signal of STOPPING has the case under way save, and then ends the process with 128 + its number.
    `run` names the run in checkpoints; it owns the folders that are saved to.
    All use engines of one package. Never raises: an error goes into the journal, and ends the process with status 1.
    """
    _end_with_the_parent()
    _environment(device_type, any(options.tensor_parallel > 1 for options in cases))
    rank, folder = int(os.environ["RANK"]), Path(journal)
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    failure = FailureContext(0)
    try:
        device = _device(device_type)
        engine_module(cases[0].engine).prepare(device)
        timeout = timedelta(minutes=cases[0].timeout_minutes)
        store = next(rendezvous("env://", timeout=timeout))[0]
        stop = None
        if any(options.save is not None for options in cases):
            stop = StopRequest(lambda: _anybody_gone(folder, cases[0].world_size))
        results = []
        for number, options in enumerate(cases):
            stage = rank // (options.data_parallel * options.tensor_parallel)
            failure = FailureContext(stage)
            with _world(PrefixStore(f"case {number}", store), rank, options.world_size, device, timeout) as host_group:
                result = run_case(options, device, failure, _into_journal(folder, rank, number), host_group, stop, run)
            if result is not None:
                results.append(result)
            if stop is not None and stop.made:
                # To return would be to wait for the agent, which now waits for this process to end.
                os._exit(128 + stop.number)
        return results
    except BaseException as error:
        append(folder, rank, _entry(silent_peer(error) or error, failure))
        time.sleep(_NOTICE_SECONDS)
        # Not sys.exit: process groups wait for their peers when they are torn down.
        os._exit(1)


def _into_journal(folder: Path, rank: int, case: int) -> RunEvents:
    """The events of case `case` go into the journal."""
    return RunEvents(
        iteration=lambda iteration, loss, ms: append(folder, rank, Iteration(case, iteration, loss, ms)),
        saved=lambda checkpoint: append(folder, rank, Saved(str(checkpoint))),
        note=lambda text: append(folder, rank, Note(text)),
    )


def _anybody_gone(folder: Path, processes: int) -> bool:
    """Whether one of the ranks below `processes`, which leave their process' number there, has ended or not begun."""
    try:
        for rank in range(processes):
            os.kill(int((folder / f"{rank}.pid").read_text()), 0)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return True
    return False


def _end_with_the_parent() -> None:
    """A parent that is killed cannot end its processes; each of them sees to that itself."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="evenpipe-parent", daemon=True).start()


def _environment(device_type: str, sharded: bool) -> None:
    # A signal must end a process even while it waits for a peer, where Python's handlers do not run.
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    # Megatron asks for one queue where tensors are sharded; elsewhere each stream is to have its own: CUDA's most.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1" if sharded else "32"
    if device_type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    else:
        # CPU mode is refused where CUDA is available, and too few GPUs are as good as none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _device(device_type: str) -> torch.device:
    """This process' device, made ready."""
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True)
        return device
    torch.set_num_threads(1)
    return torch.device("cpu")


@contextmanager
def _world(
    store: Store, rank: int, size: int, device: torch.device, timeout: timedelta
) -> Iterator[dist.ProcessGroup | None]:
    """torch.distributed initialised inside; gives a group for host memory (None: the default group will do).

    A world a case: nothing of a case, its process groups least of all, is left to the next one.
    """
    cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if cuda else None,
    )
    yield dist.new_group(backend="gloo", timeout=timeout) if cuda else None
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()


def _entry(error: BaseException, context: FailureContext) -> Failure:
    message = str(error).strip().partition("\n")[0]
    of_options = isinstance(error, OptionsError)
    is_told = of_options or getattr(error, "one_line", False)
    return Failure(
        clock=time.monotonic(),
        stage=context.stage,
        position=context.position,
        error=message if is_told else f"{type(error).__name__}: {message}" if message else type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
        of_options=of_options,
    )
